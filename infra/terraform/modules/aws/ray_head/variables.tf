variable "name" {
  description = "Of the stack; part of all names."
  type        = string
}

variable "instance_type" {
  description = "A small machine with 8 GB or more: nothing of a run is placed there but its driver."
  type        = string
  default     = "m5.large"
}

variable "image_id" {
  description = "Machine image that carries geo_ray; docs/operations/cloud-accounts.md has its recipe."
  type        = string
}

variable "subnet" {
  description = "Private subnet; its tenth address is the head's."
  type = object({
    id   = string
    cidr = string
    zone = string
  })
}

variable "security_group_ids" {
  description = "Those of all nodes and of the head."
  type        = list(string)
}

variable "instance_profile" {
  description = "Name of the profile with which the machine reads its secrets, and may rent others."
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

variable "volume_gb" {
  description = "Size of the encrypted root volume."
  type        = number
  default     = 100
}

variable "state_gb" {
  description = "Size of the encrypted volume with the head's state."
  type        = number
  default     = 10
}

variable "kms_key_arn" {
  description = "Key of both; null: the account's own."
  type        = string
  default     = null
}

variable "protected" {
  description = "Whether the machine can only be ended after this was set to false."
  type        = bool
  default     = true
}

variable "alarm_topic_arns" {
  description = "Who hears of an ill head."
  type        = list(string)
  default     = []
}

variable "tags" {
  description = "Of volumes, which a provider's default tags do not reach."
  type        = map(string)
}

variable "serves" {
  description = "Folder of the cluster whose autoscaler lives on the head, as the module boot has it; null: none does."
  type = object({
    state       = string
    keys_secret = optional(string)
  })
  default = null
}
