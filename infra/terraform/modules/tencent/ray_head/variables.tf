variable "name" {
  description = "Of the stack; part of all names."
  type        = string
}

variable "instance_type" {
  description = "A small machine with 8 GB or more: nothing of a run is placed there but its driver."
  type        = string
  default     = "S5.MEDIUM8"
}

variable "image_id" {
  description = "Machine image that carries geo_ray; docs/operations/cloud-accounts.md has its recipe."
  type        = string
}

variable "vpc_id" {
  type = string
}

variable "subnet" {
  description = "Private subnet; its tenth address is the head's."
  type        = object({ id = string, cidr = string, zone = string })
}

variable "security_group_ids" {
  description = "Those of all nodes and of the head."
  type        = list(string)
}

variable "role" {
  description = "CAM role with which the machine reads its secrets, and may rent others."
  type        = string
}

variable "join" {
  description = "Names of the secrets, interpreter of the image."
  type = object({
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

variable "state_gb" {
  description = "Size of the encrypted disk with the head's state."
  type        = number
  default     = 20
}

variable "protected" {
  description = "Whether the machine can only be ended after this was set to false."
  type        = bool
  default     = true
}

variable "tags" {
  type = map(string)
}

variable "serves" {
  description = "Folder of the cluster whose autoscaler lives on the head, as the module boot has it; null: none does."
  type = object({
    state       = string
    keys_secret = optional(string)
  })
  default = null
}
