import jax

from scalerl_jax.scaling import host


def test_fits_run_on_one_device_of_the_cpu():
  mesh = host.host_mesh()
  assert mesh.size == 1
  assert mesh.devices.item().platform == "cpu"
  assert host.host_mesh() is mesh
  assert jax.device_count() > 1  # Others are there, and stay free.
