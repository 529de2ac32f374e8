variable "name" {
  description = "Of the stack; part of all names."
  type        = string
}

variable "region" {
  description = "The cloud's region of the secrets, which is the provider's."
  type        = string
}

variable "token" {
  description = "Ray's token, the same in all clouds of a cluster."
  type        = string
  sensitive   = true
  ephemeral   = true
}

variable "token_version" {
  description = "A higher number when there is another token."
  type        = number
  default     = 1
}

variable "tls" {
  description = "Whether Ray encrypts what it says; then put certificate, key and authority into the secrets."
  type        = bool
  default     = false
}

variable "recovery_days" {
  description = "How long a removed secret can be brought back; 0: not at all."
  type        = number
  default     = 0
}

variable "tags" {
  type = map(string)
}
