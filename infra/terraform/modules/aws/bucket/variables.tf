variable "name" {
  description = "Name of the stack; part of all names."
  type        = string

  validation {
    condition     = can(regex("^[a-z][a-z0-9-]*$", var.name))
    error_message = "Give lower-case letters, digits and dashes: the name is part of a bucket's name."
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
