variable "name" {
  description = "Name of the stack; part of all names."
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
    condition     = alltrue([for pool in var.pools : contains(["on_demand", "spot"], pool.market)])
    error_message = "A market must be on_demand or spot."
  }

  validation {
    condition     = alltrue([for pool in var.pools : contains(["worker", "server"], pool.role)])
    error_message = "A role must be worker or server."
  }

  validation {
    condition     = alltrue([for pool in var.pools : pool.count >= 0 && floor(pool.count) == pool.count])
    error_message = "A count must be a whole number, 0 or more."
  }
}

variable "image_id" {
  description = "Machine image with geo_ray; docs/operations/cloud-accounts.md shows how to build it."
  type        = string
}

variable "subnets" {
  description = "Subnet by zone."
  type        = map(string)
}

variable "security_group_ids" {
  type = list(string)
}

variable "instance_profile" {
  description = "Instance profile of a machine."
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

variable "volume_gb" {
  description = "Size of the encrypted root volume."
  type        = number
  default     = 100
}

variable "root_device" {
  description = "Name of the root volume in the image."
  type        = string
  default     = "/dev/sda1"
}

variable "kms_key_id" {
  description = "Encryption key of the volumes; null: the account's default."
  type        = string
  default     = null
}

variable "tags" {
  description = "Tags of machines and volumes, to which default tags of the provider do not apply."
  type        = map(string)
}
