variable "name" {
  description = "Name of the stack; part of all names."
  type        = string
}

variable "region" {
  description = "Region of the secrets, which is the provider's."
  type        = string
}

variable "token" {
  description = "Ray's token, the same in all clouds of a cluster."
  type        = string
  sensitive   = true
  ephemeral   = true
}

variable "token_version" {
  description = "Number of the token; increase it with every new token."
  type        = number
  default     = 1
}

variable "tls" {
  description = "Whether Ray uses TLS; if so, put certificate, key and CA into the secrets."
  type        = bool
  default     = false
}

variable "recovery_days" {
  description = "Days for which a deleted secret can be restored; 0: none."
  type        = number
  default     = 0
}

variable "tags" {
  type = map(string)
}
