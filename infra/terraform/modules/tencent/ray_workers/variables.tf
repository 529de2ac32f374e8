variable "name" {
  description = "Name of stack and region; part of all names."
  type        = string
}

variable "region" {
  description = "Region of the run: the value of the label ray.io/availability-region."
  type        = string

  validation {
    condition     = can(regex("^[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?$", var.region))
    error_message = "Give at most 63 letters, digits, '-', '_' or '.', with letters or digits at both ends."
  }
}

variable "pools" {
  description = "Machines by any name, as written by `geo-ray plan --out-tfvars`."
  type = map(object({
    type   = string
    market = string
    role   = string
    count  = number
  }))

  validation {
    condition     = alltrue([for pool in var.pools : contains(["on_demand", "spot"], pool.market) && contains(["worker", "server"], pool.role)])
    error_message = "A market must be on_demand or spot, a role worker or server."
  }

  validation {
    condition     = alltrue([for pool in var.pools : pool.count >= 0 && floor(pool.count) == pool.count])
    error_message = "A count must be a whole number, 0 or more."
  }
}

variable "spot_max_prices" {
  description = "Highest hourly price of spot machines, by type, in the account's currency."
  type        = map(string)
  default     = {}

  validation {
    condition     = alltrue([for pool in var.pools : pool.market != "spot" || contains(keys(var.spot_max_prices), pool.type)])
    error_message = "Every spot type needs a price in spot_max_prices."
  }
}

variable "image_id" {
  description = "Machine image with geo_ray; docs/operations/cloud-accounts.md shows how to build it."
  type        = string
}

variable "vpc_id" {
  type = string
}

variable "subnets" {
  description = "Subnet by zone."
  type        = map(string)
}

variable "security_group_ids" {
  type = list(string)
}

variable "role" {
  description = "CAM role of a machine."
  type        = string
}

variable "join" {
  description = "How a node joins: address of the head, names of secrets, Python interpreter of the image."
  type = object({
    address         = string
    store           = string
    region          = string
    token           = string
    tls_certificate = optional(string)
    tls_key         = optional(string)
    tls_ca          = optional(string)
    python          = optional(string, "/opt/geo_ray/bin/python")
  })
}

variable "disk_gb" {
  description = "Size of the encrypted system disk."
  type        = number
  default     = 100
}

variable "tags" {
  type = map(string)
}
