variable "name" {
  description = "Of the stack; part of all names."
  type        = string

  validation {
    condition     = can(regex("^[a-z][a-z0-9-]*$", var.name))
    error_message = "Small letters, digits and dashes: it becomes part of a bucket's name."
  }
}

variable "purpose" {
  description = "data or runs."
  type        = string

  validation {
    condition     = contains(["data", "runs"], var.purpose)
    error_message = "A bucket is for data or for runs."
  }
}

variable "force_destroy" {
  description = "Whether `terraform destroy` also removes what is in it."
  type        = bool
  default     = false
}

variable "old_versions_days" {
  description = "How long an object that was overwritten or removed can be brought back."
  type        = number
  default     = 30
}
