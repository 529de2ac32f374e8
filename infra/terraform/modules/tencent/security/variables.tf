variable "name" {
  description = "Of the stack and region; part of all names."
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

variable "tags" {
  type = map(string)
}
