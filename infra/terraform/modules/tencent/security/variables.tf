variable "name" {
  description = "Name of stack and region; part of all names."
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

variable "tags" {
  type = map(string)
}
