variable "name" {
  description = "Of the stack; part of all names."
  type        = string
}

variable "cidr" {
  description = "Addresses of this region; no two regions of a stack may overlap."
  type        = string

  validation {
    condition     = can(cidrhost(var.cidr, 0)) && endswith(var.cidr, "/16")
    error_message = "Give a network of 16 bits, such as 10.20.0.0/16."
  }
}

variable "zones" {
  description = "Availability zones with a subnet; null: the region's first two."
  type        = list(string)
  default     = null

  validation {
    condition     = var.zones == null || try(length(var.zones) >= 1 && length(var.zones) <= 8, false)
    error_message = "There is room for 1 to 8 zones."
  }
}

variable "nat" {
  description = "Whether machines reach the internet (out only, by a NAT gateway); false: the cloud's APIs by private endpoints, and nothing else."
  type        = bool
  default     = true
}

variable "public_subnet" {
  description = "Whether there is a public subnet without a NAT gateway, too: for a link to another cloud."
  type        = bool
  default     = false
}
