variable "name" {
  description = "Name of the stack; part of all names."
  type        = string
}

variable "vpc_id" {
  description = "Network of the groups."
  type        = string
}

variable "cluster_cidrs" {
  description = "Networks of all regions of the cluster."
  type        = list(string)

  validation {
    condition     = length(var.cluster_cidrs) > 0 && alltrue([for each in var.cluster_cidrs : try(tonumber(split("/", each)[1]) >= 8, false)])
    error_message = "Give the cluster's networks; a network larger than /8 would expose Ray."
  }
}

variable "operator_cidrs" {
  description = "Networks that may use SSH on the head; not needed with Session Manager."
  type        = list(string)
  default     = []

  validation {
    condition     = alltrue([for each in var.operator_cidrs : try(tonumber(split("/", each)[1]) >= 16, false)])
    error_message = "Give networks of /16 or smaller: SSH must not be open to the world."
  }
}
