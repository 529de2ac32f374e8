variable "name" {
  description = "Of the stack; part of all names."
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
    error_message = "Name the cluster's own networks; one of less than 8 bits would open Ray to strangers."
  }
}

variable "operator_cidrs" {
  description = "Addresses from which people may use SSH on the head; none are needed with Session Manager."
  type        = list(string)
  default     = []

  validation {
    condition     = alltrue([for each in var.operator_cidrs : try(tonumber(split("/", each)[1]) >= 16, false)])
    error_message = "Name few addresses (at least 16 bits of network each): SSH is not opened to the world."
  }
}
