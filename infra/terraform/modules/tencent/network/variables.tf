variable "name" {
  description = "Of the stack and region; part of all names."
  type        = string
}

variable "cidr" {
  description = "Addresses of this region; no two regions of a stack may overlap."
  type        = string

  validation {
    condition     = can(cidrhost(var.cidr, 0)) && endswith(var.cidr, "/16")
    error_message = "Give a network of 16 bits, such as 10.30.0.0/16."
  }
}

variable "zones" {
  description = "Availability zones with a subnet."
  type        = list(string)

  validation {
    condition     = length(var.zones) >= 1 && length(var.zones) <= 8
    error_message = "There is room for 1 to 8 zones."
  }
}

variable "nat_mbps" {
  description = "Most that leaves for the internet; what regions exchange goes another way."
  type        = number
  default     = 50
}

variable "tags" {
  type = map(string)
}
