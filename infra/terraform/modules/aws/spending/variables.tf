variable "name" {
  description = "Name of the stack; part of all names."
  type        = string
}

variable "cluster" {
  description = "Name of the cluster: the tag geo-ray:cluster of its rented machines."
  type        = string
}

variable "usd_per_month" {
  description = "Monthly cost in USD at which the budget notifies."
  type        = number

  validation {
    condition     = var.usd_per_month > 0
    error_message = "A budget must be more than 0 USD."
  }
}

variable "emails" {
  description = "Email addresses that alarms and the budget notify; each must be confirmed once."
  type        = list(string)
  default     = []
}
