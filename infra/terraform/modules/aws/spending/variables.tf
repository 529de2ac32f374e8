variable "name" {
  description = "Of the stack; part of all names."
  type        = string
}

variable "cluster" {
  description = "Name of the cluster, which its rented machines bear as the tag geo-ray:cluster."
  type        = string
}

variable "usd_per_month" {
  description = "What stack and machines may cost in a month before somebody is told."
  type        = number

  validation {
    condition     = var.usd_per_month > 0
    error_message = "A budget is more than 0 USD."
  }
}

variable "emails" {
  description = "Who is told; each address has to be confirmed once."
  type        = list(string)
  default     = []
}
