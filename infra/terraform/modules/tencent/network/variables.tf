variable "name" {
  description = "Name of stack and region; part of all names."
  type        = string
}

variable "cidr" {
  description = "Network of this region; regions of a stack must not overlap."
  type        = string

  validation {
    condition     = can(cidrhost(var.cidr, 0)) && endswith(var.cidr, "/16")
    error_message = "Give a /16 network, such as 10.30.0.0/16."
  }
}

variable "zones" {
  description = "Availability zones with a subnet."
  type        = list(string)

  validation {
    condition     = length(var.zones) >= 1 && length(var.zones) <= 8
    error_message = "Give 1 to 8 zones."
  }
}

variable "nat_mbps" {
  description = "Bandwidth to the internet in Mbit/s; traffic between regions does not use it."
  type        = number
  default     = 50
}

variable "tags" {
  type = map(string)
}
