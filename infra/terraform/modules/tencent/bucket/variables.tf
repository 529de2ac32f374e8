variable "name" {
  description = "Name of stack and region; part of all names."
  type        = string

  validation {
    condition     = can(regex("^[a-z][a-z0-9-]{0,39}$", var.name))
    error_message = "Give at most 40 lower-case letters, digits and dashes: the name is part of a bucket's name."
  }
}

variable "purpose" {
  description = "Kind of the bucket: data or runs."
  type        = string

  validation {
    condition     = contains(["data", "runs"], var.purpose)
    error_message = "The kind must be data or runs."
  }
}

variable "kms_key_id" {
  description = "Encryption key; null: COS's own."
  type        = string
  default     = null
}

variable "force_destroy" {
  description = "Whether `terraform destroy` also deletes its objects."
  type        = bool
  default     = false
}

variable "old_versions_days" {
  description = "Days for which overwritten or deleted objects can be restored."
  type        = number
  default     = 30
}

variable "tags" {
  type = map(string)
}
