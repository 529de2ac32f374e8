output "address" {
  description = "Public address of this end."
  value       = tencentcloud_eip.this.public_ip
}
