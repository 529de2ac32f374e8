variable "cloud" {
  description = "aws or tencent."
  type        = string

  validation {
    condition     = contains(["aws", "tencent"], var.cloud)
    error_message = "The cloud is aws or tencent."
  }
}

variable "labels" {
  description = "Of the Ray node."
  type        = map(string)

  validation {
    condition     = alltrue([for key, value in var.labels : can(regex("^[A-Za-z0-9_./-]+$", key)) && can(regex("^[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?$", value))])
    error_message = "A label has at most 63 letters, digits, '-', '_' or '.', letters or digits at both ends."
  }
}

variable "join" {
  description = "How a node joins: address of the head, names of secrets, interpreter of the image."
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

  # They stand in a shell script.
  validation {
    condition     = alltrue([for value in values(var.join) : value == null || can(regex("^[A-Za-z0-9_/.:+=@-]+$", value))])
    error_message = "Nothing of it may hold blanks or other signs that a shell understands."
  }

  validation {
    condition     = can(regex("^[A-Za-z0-9.-]+:[0-9]+$", var.join.address))
    error_message = "The head's address is HOST:PORT."
  }
}

variable "serves" {
  description = "For the head alone: folder of the cluster whose autoscaler lives there, and the secret with a credentials file for it, if its role opens no bucket; null: none does."
  type = object({
    state       = string
    keys_secret = optional(string)
  })
  default = null

  validation {
    condition     = var.serves == null || can(regex("^s3://[A-Za-z0-9_/.:?&=%+-]+$", var.serves.state))
    error_message = "The folder is an address such as s3://BUCKET/clusters/NAME?region=us-east-1."
  }

  validation {
    condition     = try(var.serves.keys_secret, null) == null || can(regex("^[A-Za-z0-9_/.:+=@-]+$", var.serves.keys_secret))
    error_message = "The name of a secret has no blanks or other signs that a shell understands."
  }
}

variable "state_device" {
  description = "For the head alone: the disk that keeps its state; null: the machine is a node."
  type        = string
  default     = null

  validation {
    condition     = var.state_device == null || can(regex("^/dev/[A-Za-z0-9_/.-]+$", var.state_device))
    error_message = "A device has a path below /dev."
  }
}
