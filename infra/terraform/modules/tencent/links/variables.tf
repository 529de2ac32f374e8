variable "name" {
  description = "Of the stack; part of all names."
  type        = string
}

variable "networks" {
  description = "By region of the run: its network, and the cloud's region."
  type        = map(object({ vpc_id = string, at = string }))
}

variable "mbps" {
  description = "Most between two regions, which is paid by what is used."
  type        = number
  default     = 1000
}

variable "tags" {
  type = map(string)
}
