variable "name" {
  description = "Name of the stack; part of all names."
  type        = string
}

variable "kind" {
  description = "Kind of machines, part of the role's name: head, tunnel-REGION or nodes-REGION."
  type        = string
}

variable "cluster" {
  description = "Name of the cluster: the tag geo-ray:cluster of its rented machines."
  type        = string
}

variable "secrets" {
  description = "Secrets that may be read."
  type        = list(object({ region = string, name = string }))
}

variable "buckets" {
  description = "Buckets that may be read and written."
  type        = list(object({ region = string, name = string }))
  default     = []
}

variable "rents" {
  description = "Whether an autoscaler rents and ends machines with this role."
  type        = bool
  default     = false
}

variable "passed_roles" {
  description = "Roles of the machines that it rents."
  type        = list(string)
  default     = []
}

variable "tags" {
  type = map(string)
}
