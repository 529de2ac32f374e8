variable "name" {
  description = "Name of the stack; part of all names."
  type        = string
  default     = "geo-ray"

  validation {
    condition     = can(regex("^[a-z][a-z0-9-]{1,19}$", var.name))
    error_message = "Give 2 to 20 lower-case letters, digits and dashes, starting with a letter."
  }
}

variable "cluster" {
  description = "Name of the cluster: the tag of machines that an autoscaler rents; null: the stack's name."
  type        = string
  default     = null
}

variable "image_ids" {
  description = "Machine image by region; docs/operations/cloud-accounts.md shows how to build it."
  type        = map(string)

  validation {
    condition     = length(setsubtract(["us", "eu", "asia", "sa"], keys(var.image_ids))) == 0
    error_message = "Every region needs an image: us, eu, asia and sa."
  }
}

variable "machines" {
  description = "Machine types that a plan or an autoscaler may use, by region."
  type = map(list(object({
    type    = string
    cap     = number
    markets = optional(list(string), ["on_demand"])
  })))
  default = {
    us   = [{ type = "g5.xlarge", cap = 8, markets = ["on_demand", "spot"] }, { type = "g4dn.xlarge", cap = 8, markets = ["on_demand", "spot"] }]
    eu   = [{ type = "g5.xlarge", cap = 4, markets = ["on_demand", "spot"] }]
    asia = [{ type = "g4dn.xlarge", cap = 6, markets = ["on_demand", "spot"] }]
    sa   = [{ type = "g4dn.xlarge", cap = 4, markets = ["on_demand", "spot"] }]
  }
}

variable "server" {
  description = "Instance type of each region's parameter server and bridge; null: on a worker's machine."
  type        = string
  default     = "m5.2xlarge"
}

variable "workers" {
  description = "Machines that Terraform controls, by region, as written by `geo-ray plan --out-tfvars`; empty: an autoscaler rents them."
  type = map(map(object({
    type   = string
    market = string
    role   = string
    count  = number
  })))
  default = {}

  validation {
    condition     = length(setsubtract(keys(var.workers), ["us", "eu", "asia", "sa"])) == 0
    error_message = "This stack has the regions us, eu, asia and sa."
  }
}

variable "rents" {
  description = "Whether an autoscaler on the head may rent and end machines."
  type        = bool
  default     = true
}

variable "usd_per_month" {
  description = "Monthly cost in USD at which the budget notifies."
  type        = number
  default     = 1000
}

variable "emails" {
  description = "Email addresses that the budget notifies."
  type        = list(string)
  default     = []
}

variable "tls" {
  description = "Whether Ray uses TLS; if so, fill the secrets tls-* before machines start."
  type        = bool
  default     = false
}

variable "nat" {
  description = "Whether machines can open connections to the internet; the autoscaler's prices need it."
  type        = bool
  default     = true
}

variable "protected" {
  description = "Whether `terraform destroy` refuses to delete head, data and runs; set it to false and apply first to delete them."
  type        = bool
  default     = true
}

variable "operator_cidrs" {
  description = "Networks that may use SSH on the head; not needed with Session Manager."
  type        = list(string)
  default     = []
}
