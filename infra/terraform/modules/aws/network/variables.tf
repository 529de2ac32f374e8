variable "name" {
  description = "Name of the stack; part of all names."
  type        = string
}

variable "cidr" {
  description = "Network of this region; regions of a stack must not overlap."
  type        = string

  validation {
    condition     = can(cidrhost(var.cidr, 0)) && endswith(var.cidr, "/16")
    error_message = "Give a /16 network, such as 10.20.0.0/16."
  }
}

variable "zones" {
  description = "Availability zones with a subnet; null: the region's first two."
  type        = list(string)
  default     = null

  validation {
    condition     = var.zones == null || try(length(var.zones) >= 1 && length(var.zones) <= 8, false)
    error_message = "Give 1 to 8 zones."
  }
}

variable "nat" {
  description = "Whether machines can open connections to the internet through a NAT gateway; false: only to the cloud's APIs, through private endpoints."
  type        = bool
  default     = true
}

variable "public_subnet" {
  description = "Whether to create a public subnet even without a NAT gateway, for a tunnel to another cloud."
  type        = bool
  default     = false
}
