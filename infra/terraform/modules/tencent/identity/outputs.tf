output "role" {
  description = "Name of the role."
  value       = tencentcloud_cam_role.this.name
}
