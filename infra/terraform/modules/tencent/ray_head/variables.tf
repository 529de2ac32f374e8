variable "name" {
  description = "Name of the stack; part of all names."
  type        = string
}

variable "instance_type" {
  description = "Instance type of the head: a small machine with 8 GB or more."
  type        = string
  default     = "S5.MEDIUM8"
}

variable "image_id" {
  description = "Machine image with geo_ray; docs/operations/cloud-accounts.md shows how to build it."
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
  description = "Security groups of all nodes and of the head."
  type        = list(string)
}

variable "role" {
  description = "CAM role of the head."
  type        = string
}

variable "join" {
  description = "Names of the secrets, Python interpreter of the image."
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
  description = "Whether the machine is protected from termination."
  type        = bool
  default     = true
}

variable "tags" {
  type = map(string)
}

variable "serves" {
  description = "Folder of the cluster whose autoscaler runs on the head, as in the module boot; null: none."
  type = object({
    state       = string
    keys_secret = optional(string)
  })
  default = null
}
