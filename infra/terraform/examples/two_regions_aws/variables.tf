variable "name" {
  description = "Of the stack; part of all names."
  type        = string
  default     = "geo-ray"

  validation {
    condition     = can(regex("^[a-z][a-z0-9-]{1,19}$", var.name))
    error_message = "2 to 20 small letters, digits and dashes, a letter first."
  }
}

variable "cluster" {
  description = "Name of the cluster, which machines that are rented beside Terraform bear as a tag; null: as the stack."
  type        = string
  default     = null
}

variable "image_ids" {
  description = "Machine image by region; docs/operations/cloud-accounts.md has its recipe."
  type        = map(string)

  validation {
    condition     = length(setsubtract(["us", "eu"], keys(var.image_ids))) == 0
    error_message = "Every region needs an image: us and eu."
  }
}

variable "machines" {
  description = "What a plan or an autoscaler may rent, by region."
  type = map(list(object({
    type    = string
    cap     = number
    markets = optional(list(string), ["on_demand"])
  })))
  default = {
    us = [{ type = "g5.xlarge", cap = 8, markets = ["on_demand", "spot"] }, { type = "g4dn.xlarge", cap = 8, markets = ["on_demand", "spot"] }]
    eu = [{ type = "g5.xlarge", cap = 4, markets = ["on_demand", "spot"] }]
  }
}

variable "server" {
  description = "Instance type of each region's parameter server and bridge; null: on a worker's."
  type        = string
  default     = "m5.2xlarge"
}

variable "workers" {
  description = "Machines whose number Terraform owns, by region, as `geo-ray plan --out-tfvars` writes them; none: an autoscaler rents them."
  type = map(map(object({
    type   = string
    market = string
    role   = string
    count  = number
  })))
  default = {}

  validation {
    condition     = length(setsubtract(keys(var.workers), ["us", "eu"])) == 0
    error_message = "This stack has the regions us and eu."
  }
}

variable "rents" {
  description = "Whether an autoscaler on the head may rent and end machines."
  type        = bool
  default     = true
}

variable "usd_per_month" {
  description = "What stack and machines may cost in a month before somebody is told."
  type        = number
  default     = 500
}

variable "emails" {
  description = "Who is told."
  type        = list(string)
  default     = []
}

variable "tls" {
  description = "Whether Ray encrypts what it says; then fill the secrets tls-* before machines start."
  type        = bool
  default     = false
}

variable "nat" {
  description = "Whether machines reach the internet, out only; prices of the autoscaler need it."
  type        = bool
  default     = true
}

variable "protected" {
  description = "Whether head, data and runs outlive `terraform destroy`: set it to false and apply first, if they shall not."
  type        = bool
  default     = true
}

variable "operator_cidrs" {
  description = "Addresses from which people may use SSH on the head; none are needed with Session Manager."
  type        = list(string)
  default     = []
}
