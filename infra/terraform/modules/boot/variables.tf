variable "cloud" {
  description = "Cloud: aws or tencent."
  type        = string

  validation {
    condition     = contains(["aws", "tencent"], var.cloud)
    error_message = "The cloud must be aws or tencent."
  }
}

variable "labels" {
  description = "Labels of the Ray node."
  type        = map(string)

  validation {
    condition     = alltrue([for key, value in var.labels : can(regex("^[A-Za-z0-9_./-]+$", key)) && can(regex("^[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?$", value))])
    error_message = "A label must have at most 63 letters, digits, '-', '_' or '.', with letters or digits at both ends."
  }
}

variable "join" {
  description = "How a node joins: address of the head, names of secrets, Python interpreter of the image."
  type = object({
    address         = string
    store           = string
    region          = string
    token           = string
    tls_certificate = optional(string)
    tls_key         = optional(string)
    tls_ca          = optional(string)
    python          = optional(string, "/opt/geo_ray/bin/python")
  })

  # They are inserted into a shell script.
  validation {
    condition     = alltrue([for value in values(var.join) : value == null || can(regex("^[A-Za-z0-9_/.:+=@-]+$", value))])
    error_message = "No value may contain blanks or shell metacharacters."
  }

  validation {
    condition     = can(regex("^[A-Za-z0-9.-]+:[0-9]+$", var.join.address))
    error_message = "The head's address must be HOST:PORT."
  }
}

variable "serves" {
  description = "Head only: folder of the cluster whose autoscaler runs there, and the secret with a credentials file for it if the role cannot open a bucket; null: none."
  type = object({
    state       = string
    keys_secret = optional(string)
  })
  default = null

  validation {
    condition     = var.serves == null || can(regex("^s3://[A-Za-z0-9_/.:?&=%+-]+$", var.serves.state))
    error_message = "The folder must be an address such as s3://BUCKET/clusters/NAME?region=us-east-1."
  }

  validation {
    condition     = try(var.serves.keys_secret, null) == null || can(regex("^[A-Za-z0-9_/.:+=@-]+$", var.serves.keys_secret))
    error_message = "The name of a secret must not contain blanks or shell metacharacters."
  }
}

variable "state_device" {
  description = "Head only: disk with its state; null: the machine is a node."
  type        = string
  default     = null

  validation {
    condition     = var.state_device == null || can(regex("^/dev/[A-Za-z0-9_/.-]+$", var.state_device))
    error_message = "A device must be a path below /dev."
  }
}
