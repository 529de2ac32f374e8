variable "name" {
  description = "Name of the stack; part of all names."
  type        = string
}

variable "tls" {
  description = "Whether Ray uses TLS; if so, put certificate, key and CA into the secrets."
  type        = bool
  default     = false
}

variable "token_version" {
  description = "A higher number creates another token; all nodes must be restarted."
  type        = number
  default     = 1
}

variable "recovery_days" {
  description = "Days for which a deleted secret can be restored and its name not be reused: 0, or 7 to 30."
  type        = number
  default     = 0

  validation {
    condition     = var.recovery_days == 0 || (var.recovery_days >= 7 && var.recovery_days <= 30)
    error_message = "Give 0, or 7 to 30 days."
  }
}
