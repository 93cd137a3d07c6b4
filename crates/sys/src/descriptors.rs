//! Descriptors that child programs of this process inherit.

use std::io;

/// Keeps all descriptors but standard input, output and error from programs that this process
/// starts from now on.
///
/// # Errors
/// The kernel lacks the call, and procfs does not list the descriptors.
pub fn keep_descriptors_from_programs() -> io::Result<()> {
    const FIRST: libc::c_uint = 3;
    // SAFETY: the call takes three numbers. It sets a flag of descriptors, and closes none of them
    // in this process.
    let done = unsafe {
        libc::syscall(
            libc::SYS_close_range,
            FIRST,
            libc::c_uint::MAX,
            libc::CLOSE_RANGE_CLOEXEC,
        )
    };
    if done == 0 {
        return Ok(());
    }
    // Linux before 5.11 lacks the flag.
    for entry in std::fs::read_dir("/proc/self/fd")? {
        let name = entry?.file_name();
        let number = name.to_str().and_then(|name| name.parse().ok());
        if let Some(number) = number.filter(|&number: &libc::c_int| number > 2) {
            // SAFETY: as above. The descriptor of the listing itself may be gone already, and its
            // error changes nothing.
            unsafe { libc::fcntl(number, libc::F_SETFD, libc::FD_CLOEXEC) };
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd;
    use std::process::Command;

    use rustix::io::{FdFlags, fcntl_setfd};

    use super::*;

    #[test]
    fn a_program_gets_no_descriptor_that_its_starter_inherited() {
        let (reader, writer) = io::pipe().unwrap();
        fcntl_setfd(&writer, FdFlags::empty()).unwrap();
        let fd = writer.as_raw_fd();
        let is_passed_on = || {
            let mut ls = Command::new("ls");
            let out = ls.arg(format!("/proc/self/fd/{fd}")).output().unwrap();
            String::from_utf8_lossy(&out.stdout).contains("fd") && out.status.success()
        };
        assert!(is_passed_on(), "the test would see it");
        keep_descriptors_from_programs().unwrap();
        assert!(!is_passed_on());
        drop(reader);
    }
}
