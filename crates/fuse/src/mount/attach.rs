//! The mount system call, and the descriptor of `/dev/fuse` that belongs to a mount.
//!
//! A process with the right to mount opens the device and calls mount(2). Any other process asks
//! fusermount3, which has the right and does the same. fusermount3 sends the descriptor back over a
//! socket (`SCM_RIGHTS`). The socket is the standard input of fusermount3, so that no other program
//! that this process starts meanwhile inherits it.

use std::ffi::CString;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::Path;
use std::process::{Child, Command, Stdio};

use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::mount::MountFlags;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SocketFlags, SocketType,
};

use ramet_fs::AccessTime;

use crate::mount::options::{Durability, MountOptions};

const DEVICE: &str = "/dev/fuse";
pub(super) const HELPER: &str = "fusermount3";
/// The environment variable in which fusermount3 finds the number of the socket.
const HELPER_SOCKET: &str = "_FUSE_COMMFD";

/// Mounts on `dir`, which is absolute and without links. The kernel's first request waits in the
/// device.
///
/// # Errors
/// The error of the kernel or of fusermount3.
pub(crate) fn attach(dir: &Path, options: &MountOptions) -> io::Result<OwnedFd> {
    match attach_directly(dir, options) {
        Err(error) if Errno::from_io_error(&error) == Some(Errno::PERM) => {
            attach_with_helper(dir, options)
        }
        attached => attached,
    }
}

fn attach_directly(dir: &Path, options: &MountOptions) -> io::Result<OwnedFd> {
    let flags = OFlags::RDWR | OFlags::CLOEXEC;
    let device = rustix::fs::open(DEVICE, flags, Mode::empty())?;
    let root_type = rustix::fs::stat(dir)?.st_mode & rustix::fs::FileType::Directory.as_raw_mode();
    let data = kernel_options(&device, root_type, options);
    let source = CString::new(options.fsname.as_bytes())?;
    let flags = mount_flags(options, is_root());
    let kind = format!("fuse.{}", options.subtype);
    rustix::mount::mount(source, dir, kind, flags, &*CString::new(data)?)?;
    Ok(device)
}

/// The options that only FUSE knows, as text.
fn kernel_options(device: &OwnedFd, root_type: u32, options: &MountOptions) -> String {
    let user = rustix::process::getuid().as_raw();
    let group = rustix::process::getgid().as_raw();
    let mut data = format!(
        "fd={},rootmode={root_type:o},user_id={user},group_id={group},default_permissions",
        device.as_raw_fd()
    );
    if options.allow_other {
        data.push_str(",allow_other");
    }
    for label in labels(options) {
        data.push(',');
        data.push_str(label);
    }
    data
}

/// The labels that the kernel takes: none without SELinux.
fn labels(options: &MountOptions) -> &[String] {
    if Path::new("/sys/fs/selinux/enforce").exists() {
        &options.labels
    } else {
        &[]
    }
}

/// `MS_NOSYMFOLLOW`, Linux 5.10.
const NO_SYMFOLLOW: MountFlags = MountFlags::from_bits_retain(256);

/// Flags of mount(2). Only root's mounts have setuid bits and device nodes.
fn mount_flags(options: &MountOptions, is_root: bool) -> MountFlags {
    let choices = [
        (options.read_only, MountFlags::RDONLY),
        (options.nosuid || !is_root, MountFlags::NOSUID),
        (options.nodev || !is_root, MountFlags::NODEV),
        (options.noexec, MountFlags::NOEXEC),
        (options.nosymfollow, NO_SYMFOLLOW),
        (
            options.access_time == AccessTime::Never,
            MountFlags::NOATIME,
        ),
        (
            options.durability == Durability::Everything,
            MountFlags::SYNCHRONOUS,
        ),
        (
            options.durability == Durability::Directories,
            MountFlags::DIRSYNC,
        ),
    ];
    let chosen = choices.into_iter().filter(|(chosen, _)| *chosen);
    chosen.map(|(_, flag)| flag).collect()
}

fn attach_with_helper(dir: &Path, options: &MountOptions) -> io::Result<OwnedFd> {
    let (ours, theirs) = rustix::net::socketpair(
        AddressFamily::UNIX,
        SocketType::STREAM,
        SocketFlags::CLOEXEC,
        None,
    )?;
    let helper = Command::new(&options.helper)
        .arg("-o")
        .arg(helper_options(options, is_root()))
        .arg("--")
        .arg(dir)
        .env(HELPER_SOCKET, "0")
        .stdin(theirs)
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()?;
    let received = receive(&ours);
    // A helper that still waits for this process finds the socket closed.
    drop(ours);
    let said = said(helper)?;
    match received {
        Ok(device) => Ok(device),
        Err(_) if said.contains("only allowed if 'user_allow_other' is set") => {
            Err(io::Error::new(io::ErrorKind::PermissionDenied, said))
        }
        Err(error) if said.is_empty() => Err(error),
        Err(_) => Err(io::Error::other(said)),
    }
}

/// The complaint of the helper, once it has ended.
fn said(helper: Child) -> io::Result<String> {
    let output = helper.wait_with_output()?;
    Ok(String::from_utf8_lossy(&output.stderr).trim().to_owned())
}

fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

/// Options as fusermount3 reads them. fusermount3 takes setuid bits and device nodes away from all
/// mounts, and leaves them to root on request.
fn helper_options(options: &MountOptions, is_root: bool) -> String {
    let mut list = format!(
        "fsname={},subtype={},default_permissions",
        escape(&options.fsname),
        options.subtype
    );
    let choices = [
        (options.read_only, "ro"),
        (options.nosuid, "nosuid"),
        (options.nodev, "nodev"),
        (options.noexec, "noexec"),
        (options.nosymfollow, "nosymfollow"),
        (options.access_time == AccessTime::Never, "noatime"),
        (options.durability == Durability::Everything, "sync"),
        (options.durability == Durability::Directories, "dirsync"),
        (is_root && !options.nosuid, "suid"),
        (is_root && !options.nodev, "dev"),
        (options.allow_other, "allow_other"),
    ];
    for (_, option) in choices.into_iter().filter(|(chosen, _)| *chosen) {
        list.push(',');
        list.push_str(option);
    }
    for label in labels(options) {
        list.push(',');
        list.push_str(&escape(label));
    }
    list
}

/// Escapes commas, which end an option, and backslashes.
fn escape(value: &str) -> String {
    let mut escaped = String::with_capacity(value.len());
    for letter in value.chars() {
        if matches!(letter, ',' | '\\') {
            escaped.push('\\');
        }
        escaped.push(letter);
    }
    escaped
}

/// The descriptor that comes with the first byte on the socket.
fn receive(socket: impl AsFd) -> io::Result<OwnedFd> {
    let mut byte = [0];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut messages = RecvAncillaryBuffer::new(&mut space);
    loop {
        let mut parts = [io::IoSliceMut::new(&mut byte)];
        let received =
            rustix::net::recvmsg(&socket, &mut parts, &mut messages, RecvFlags::CMSG_CLOEXEC);
        match received {
            Ok(_) => break,
            Err(Errno::INTR) => {}
            Err(errno) => return Err(errno.into()),
        }
    }
    let descriptor = messages.drain().find_map(|message| match message {
        RecvAncillaryMessage::ScmRights(mut descriptors) => descriptors.next(),
        _ => None,
    });
    descriptor.ok_or_else(|| io::Error::other(format!("{HELPER} sent no descriptor")))
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};

    use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags};

    use super::*;

    fn options(fsname: &str, list: &str) -> MountOptions {
        let mut options = MountOptions::new(fsname);
        options.allow_other = false;
        options.add(list).unwrap();
        options
    }

    #[test]
    fn names_keep_commas_and_backslashes_on_their_way_through_the_helper() {
        let list = helper_options(&options(r"/a,b\c\", "ro,nosuid,noatime"), false);
        let expected = r"fsname=/a\,b\\c\\,subtype=ramet,default_permissions,ro,nosuid,noatime";
        assert_eq!(list, expected);
    }

    #[test]
    fn options_of_the_system_are_flags_and_those_of_fuse_are_text() {
        let all = options(
            "v",
            "ro,nosuid,nodev,noexec,nosymfollow,noatime,allow_other",
        );
        let expected = MountFlags::RDONLY
            | MountFlags::NOSUID
            | MountFlags::NODEV
            | MountFlags::NOEXEC
            | MountFlags::NOATIME
            | NO_SYMFOLLOW;
        assert_eq!(mount_flags(&all, true), expected);
        assert_eq!(
            mount_flags(&options("v", "suid"), true),
            MountFlags::empty()
        );
        let device = OwnedFd::from(tempfile::tempfile().unwrap());
        let data = kernel_options(&device, 0o040_000, &all);
        let start = format!("fd={},rootmode=40000,user_id=", device.as_raw_fd());
        assert!(data.starts_with(&start), "{data}");
        assert!(data.ends_with(",default_permissions,allow_other"), "{data}");
    }

    fn pair() -> (OwnedFd, OwnedFd) {
        let flags = SocketFlags::CLOEXEC;
        rustix::net::socketpair(AddressFamily::UNIX, SocketType::STREAM, flags, None).unwrap()
    }

    #[test]
    fn a_descriptor_comes_over_the_socket() {
        let (ours, theirs) = pair();
        let (mut reader, writer) = io::pipe().unwrap();
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut messages = SendAncillaryBuffer::new(&mut space);
        let sent = [writer.as_fd()];
        assert!(messages.push(SendAncillaryMessage::ScmRights(&sent)));
        let parts = [io::IoSlice::new(b"\0")];
        rustix::net::sendmsg(&theirs, &parts, &mut messages, SendFlags::empty()).unwrap();
        let mut received = std::fs::File::from(receive(&ours).unwrap());
        received.write_all(b"hello").unwrap();
        drop((received, writer));
        let mut text = String::new();
        reader.read_to_string(&mut text).unwrap();
        assert_eq!(text, "hello");
    }

    #[test]
    fn a_helper_that_ends_without_a_descriptor_is_an_error() {
        let (ours, theirs) = pair();
        drop(theirs);
        assert!(receive(&ours).is_err());
    }
}
