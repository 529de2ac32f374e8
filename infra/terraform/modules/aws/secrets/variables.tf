variable "name" {
  description = "Of the stack; part of all names."
  type        = string
}

variable "tls" {
  description = "Whether Ray encrypts what it says; then put certificate, key and authority into the secrets."
  type        = bool
  default     = false
}

variable "token_version" {
  description = "A higher number makes another token; all nodes have to be started anew."
  type        = number
  default     = 1
}

variable "recovery_days" {
  description = "How long a removed secret can be brought back, and its name not be used again: 0, or 7 to 30."
  type        = number
  default     = 0

  validation {
    condition     = var.recovery_days == 0 || (var.recovery_days >= 7 && var.recovery_days <= 30)
    error_message = "Give 0, or 7 to 30 days."
  }
}
