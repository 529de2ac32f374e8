variable "name" {
  description = "Name of the stack; part of all names."
  type        = string
}

variable "kind" {
  description = "Kind of machines, part of the role's name: head or nodes-REGION."
  type        = string
}

variable "cluster" {
  description = "Name of the cluster: the tag geo-ray:cluster of its rented machines."
  type        = string
}

variable "secret_arns" {
  description = "Secrets that may be read."
  type        = list(string)
}

variable "kms_key_arns" {
  description = "Keys of those secrets and of the buckets."
  type        = list(string)
}

variable "bucket_arns" {
  description = "Buckets that may be read and written."
  type        = list(string)
  default     = []
}

variable "runs" {
  description = "Nodes only: bucket of the runs, and the run's region whose checkpoint parts they write; null: none."
  type        = object({ arn = string, region = string })
  default     = null
}

variable "rents" {
  description = "Whether an autoscaler rents and ends machines with this role."
  type        = bool
  default     = false
}

variable "passed_role_arns" {
  description = "Roles of the machines that it rents."
  type        = list(string)
  default     = []
}
