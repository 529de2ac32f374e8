output "address" {
  description = "Public address of this end."
  value       = aws_eip.this.public_ip
}
