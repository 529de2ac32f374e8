variable "name" {
  description = "Of the stack; part of all names."
  type        = string
}

variable "kind" {
  description = "Of machines, for the role's name: head, or nodes-REGION."
  type        = string
}

variable "cluster" {
  description = "Name of the cluster, which its rented machines bear as the tag geo-ray:cluster."
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
  description = "For nodes: the bucket of the runs, and the region of the run whose parts of checkpoints they write there; null: none."
  type        = object({ arn = string, region = string })
  default     = null
}

variable "rents" {
  description = "Whether an autoscaler rents and ends machines with this role."
  type        = bool
  default     = false
}

variable "passed_role_arns" {
  description = "Roles that the machines it rents get."
  type        = list(string)
  default     = []
}
