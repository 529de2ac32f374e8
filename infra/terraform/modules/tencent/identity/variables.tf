variable "name" {
  description = "Of the stack; part of all names."
  type        = string
}

variable "kind" {
  description = "Of machines, for the role's name: head, tunnel-REGION or nodes-REGION."
  type        = string
}

variable "cluster" {
  description = "Name of the cluster, which its rented machines bear as the tag geo-ray:cluster."
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
  description = "Roles that the machines it rents get."
  type        = list(string)
  default     = []
}

variable "tags" {
  type = map(string)
}
