variable "name" {
  description = "Name of the stack; part of all names."
  type        = string
}

variable "networks" {
  description = "Network and cloud region by region of the run."
  type        = map(object({ vpc_id = string, at = string }))
}

variable "mbps" {
  description = "Bandwidth between two regions in Mbit/s, billed by traffic."
  type        = number
  default     = 1000
}

variable "tags" {
  type = map(string)
}
