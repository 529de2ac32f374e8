variable "name" {
  description = "Name of the stack; part of all names."
  type        = string
}

variable "instance_type" {
  description = "Instance type of the head: a small machine with 8 GB or more."
  type        = string
  default     = "m5.large"
}

variable "image_id" {
  description = "Machine image with geo_ray; docs/operations/cloud-accounts.md shows how to build it."
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
  description = "Security groups of all nodes and of the head."
  type        = list(string)
}

variable "instance_profile" {
  description = "Instance profile of the head."
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
  description = "Encryption key of both disks; null: the account's default."
  type        = string
  default     = null
}

variable "protected" {
  description = "Whether the machine is protected from termination."
  type        = bool
  default     = true
}

variable "alarm_topic_arns" {
  description = "Topics that the head's alarms notify."
  type        = list(string)
  default     = []
}

variable "tags" {
  description = "Tags of volumes, to which default tags of the provider do not apply."
  type        = map(string)
}

variable "serves" {
  description = "Folder of the cluster whose autoscaler runs on the head, as in the module boot; null: none."
  type = object({
    state       = string
    keys_secret = optional(string)
  })
  default = null
}
