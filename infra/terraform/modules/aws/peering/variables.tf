variable "name" {
  description = "Name of the link."
  type        = string
}

variable "from" {
  description = "One network, as the module network gives it."
  type = object({
    vpc_id         = string
    cidr           = string
    route_table_id = string
  })
}

variable "to" {
  description = "Network of the other region."
  type = object({
    vpc_id         = string
    cidr           = string
    route_table_id = string
  })

  validation {
    condition     = var.from.cidr != var.to.cidr
    error_message = "Two regions have the same network."
  }
}
