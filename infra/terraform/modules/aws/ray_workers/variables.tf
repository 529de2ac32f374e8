variable "name" {
  description = "Of the stack; part of all names."
  type        = string
}

variable "region" {
  description = "Region of the run: the value of the label ray.io/availability-region."
  type        = string

  validation {
    condition     = can(regex("^[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?$", var.region))
    error_message = "At most 63 letters, digits, '-', '_' or '.', letters or digits at both ends."
  }
}

variable "pools" {
  description = "Machines by a name of your own, as `geo-ray plan --out-tfvars` writes them."
  type = map(object({
    type   = string
    market = string
    role   = string
    count  = number
  }))

  validation {
    condition     = alltrue([for pool in var.pools : contains(["on_demand", "spot"], pool.market)])
    error_message = "A market is on_demand or spot."
  }

  validation {
    condition     = alltrue([for pool in var.pools : contains(["worker", "server"], pool.role)])
    error_message = "A role is worker or server."
  }

  validation {
    condition     = alltrue([for pool in var.pools : pool.count >= 0 && floor(pool.count) == pool.count])
    error_message = "A count is a whole number, 0 or more."
  }
}

variable "image_id" {
  description = "Machine image that carries geo_ray; docs/operations/cloud-accounts.md has its recipe."
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
  description = "Name of the profile with which a machine reads its secrets."
  type        = string
}

variable "join" {
  description = "How a node joins: address of the head, names of secrets, interpreter of the image."
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
  description = "The image's own name of its root volume."
  type        = string
  default     = "/dev/sda1"
}

variable "kms_key_id" {
  description = "Key of the volumes; null: the account's own."
  type        = string
  default     = null
}

variable "tags" {
  description = "Of machines and volumes, which a provider's default tags do not reach."
  type        = map(string)
}
