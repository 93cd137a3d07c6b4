//! Requests about the contents and attributes of an inode.
//!
//! A request that changes a file follows the same steps. [`Prefetcher::touched`] takes the file out
//! of the files to be sent, [`PageCache::expose`] notes the old end, the volume changes, and then the
//! kernel hears of cleared privileges and gets zeros over the old end.

use std::sync::Arc;

use ramet_block::failpoints;
use ramet_fs::{
    Attr, Capabilities, Credentials, Error, Ino, Invalidation, SetAttr, SetXattr, Volume, Written,
};
use rustix::fs::{FallocateFlags, OFlags, XattrFlags};
use rustix::io::Errno;

use crate::cache::kept_listings::KeptListings;
use crate::cache::notify::Kernel;
use crate::cache::prefetch::Touch;
use crate::cache::probe_file::{PROBE_INO, ProbeFile};
use crate::protocol::abi;
use crate::protocol::negotiate::DIRECT_HANDLE;
use crate::protocol::{Answer, FileHandle, answer};
use crate::server::credentials::{
    Requester, caller_of, credentials_of, credentials_without_fsetid,
};
use crate::server::page_cache::PageCache;
use crate::server::prefetcher::Prefetcher;
use crate::server::request_counts::RequestCounts;

/// The attribute that the kernel asks for before a program writes to a file for the first time.
const CAPABILITY: &[u8] = b"security.capability";

/// The inodes of a volume, as the kernel reads and changes them.
pub(crate) struct Files {
    pub(super) volume: Arc<Volume>,
    pub(super) kernel: Kernel,
    pub(super) pages: PageCache,
    pub(super) prefetcher: Prefetcher,
    pub(super) probe_file: Arc<ProbeFile>,
    pub(super) counts: Arc<RequestCounts>,
    pub(super) kept_listings: Arc<KeptListings>,
}

impl Files {
    pub(crate) fn forget(&self, node: Ino, lookups: u64) {
        let last = || {
            self.prefetcher.forgotten(node);
            self.pages.forget(node);
            self.kept_listings.forgotten(node);
        };
        self.volume.forget_noting(node, lookups, last);
    }

    pub(crate) fn getattr(&self, node: Ino) -> Answer<Attr> {
        answer(self.volume.attributes().getattr(node))
    }

    /// Sets attributes. With `kills`, the kernel says that a new size clears setuid and setgid: the
    /// process has no `CAP_FSETID`.
    pub(crate) fn setattr(
        &self,
        node: Ino,
        (set, kills): (&SetAttr, bool),
        requester: Requester,
    ) -> Answer<Attr> {
        let Some(size_bytes) = set.size_bytes else {
            return set_attributes(&self.volume, node, set, requester);
        };
        self.prefetcher.touched(node, Touch::Size)?;
        self.pages.note_resized(node);
        self.pages.wait_for_clears(node);
        let exposed = self.pages.expose(node, size_bytes);
        let changes_owner = set.uid.is_some() || set.gid.is_some();
        let attr = if changes_owner {
            set_attributes(&self.volume, node, set, requester)?
        } else {
            let writer: &dyn Fn() -> Credentials = &|| credentials_without_fsetid(requester);
            let attributes = self.volume.attributes();
            answer(attributes.setattr(node, set, kills.then_some(writer)))?
        };
        self.pages.clear_tail(exposed);
        Ok(attr)
    }

    /// Whether the kernel must write back the pages of a file before its time of modification is
    /// set. With a new size the answer is no: the kernel then holds the write-back until it has the
    /// answer.
    pub(crate) fn sets_time_of_mapped(&self, node: Ino, set: &SetAttr) -> bool {
        set.mtime.is_some() && set.size_bytes.is_none() && self.pages.is_mapped(node)
    }

    pub(crate) fn readlink(&self, node: Ino) -> Answer<Vec<u8>> {
        answer(self.volume.attributes().readlink(node)).map(|target| target.to_vec())
    }

    pub(crate) fn read_into(
        &self,
        node: Ino,
        offset: u64,
        buf: &mut [u8],
        thread: u32,
    ) -> Answer<usize> {
        self.pages.note_filled(node);
        self.prefetcher.reads(node, thread)?;
        answer(self.volume.files().read_into(node, offset, buf))
    }

    /// The kernel opens a file, for the first time in this mount.
    pub(crate) fn opens(&self, node: Ino) {
        if node == PROBE_INO {
            self.probe_file.opened();
        }
    }

    /// Writes bytes, and answers their number. A program gets a smaller number where a write could
    /// be made in part only. A page that is written back is written whole, or fails.
    pub(crate) fn write(
        &self,
        (node, fh): (Ino, FileHandle),
        offset: u64,
        data: &[u8],
        (flags, open_flags): (u32, u32),
        requester: Requester,
    ) -> Answer<usize> {
        if node == PROBE_INO {
            failpoints::die_at("probe-write");
            self.probe_file.written();
            return Ok(data.len());
        }
        if let Some(import) = self.volume.imports().of_stream(node) {
            return answer(import.write(offset, data)).map(|()| data.len());
        }
        let is_mapped = flags & abi::write::CACHE != 0;
        let touch = if is_mapped {
            Touch::Page
        } else {
            Touch::Filled
        };
        self.prefetcher.touched(node, touch)?;
        let exposed = if is_mapped {
            None
        } else {
            self.pages.expose(node, offset)
        };
        if is_mapped {
            self.pages.note_written_back(node);
        } else if fh != DIRECT_HANDLE {
            self.pages.note_filled(node);
        }
        // The kernel sets the flag for a process without CAP_FSETID, with any mode of the file.
        let writer: &dyn Fn() -> Credentials = &|| credentials_without_fsetid(requester);
        let writer = (flags & abi::write::KILL_SUIDGID != 0).then_some(writer);
        let files = self.volume.files();
        let appends = OFlags::from_bits_retain(open_flags).contains(OFlags::APPEND);
        let written = if is_mapped {
            let bytes = data.len();
            let data = self.pages.masked(node, offset, data);
            let written = files.write(node, offset, &data, writer);
            written.map(|cleared| Written { bytes, cleared })
        } else if appends {
            files.append(node, offset, data, writer)
        } else {
            files.write_some(node, offset, data, writer)
        };
        if is_mapped && written.is_err() {
            self.counts.count_failed_write_back();
        }
        if is_mapped && matches!(written, Err(Error::NotPermitted)) {
            self.pages.drop_all(node);
        }
        // The write-back of pages that failed may have been made in part.
        let cleared = written.as_ref().map_or(true, |written| written.cleared);
        self.cleared(node, cleared);
        if !is_mapped && fh == DIRECT_HANDLE {
            self.pages.written_past(node, (offset, data.len()));
        }
        let bytes = answer(written)?.bytes;
        self.pages.clear_tail_of_write(exposed);
        Ok(bytes)
    }

    pub(crate) fn fallocate(
        &self,
        node: Ino,
        (offset, length): (u64, u64),
        mode: u32,
        requester: Requester,
    ) -> Answer<()> {
        self.prefetcher.touched(node, Touch::Size)?;
        self.pages.note_resized(node);
        let flags = FallocateFlags::from_bits_retain(mode);
        let keep_size = flags.contains(FallocateFlags::KEEP_SIZE);
        let end = (!keep_size).then(|| offset.saturating_add(length));
        let exposed = end.and_then(|end| self.pages.expose(node, end));
        let writer = || credentials_of(requester);
        let rest = flags - FallocateFlags::KEEP_SIZE;
        let volume = &self.volume;
        let reshaped = if rest.is_empty() {
            volume
                .files()
                .allocate(node, offset, length, keep_size, Some(&writer))
        } else if rest == FallocateFlags::ZERO_RANGE
            || (rest == FallocateFlags::PUNCH_HOLE && keep_size)
        {
            volume
                .files()
                .zero_range(node, offset, length, keep_size, Some(&writer))
        } else {
            Err(Error::Unsupported)
        };
        self.cleared(node, answer(reshaped)?);
        self.pages.clear_tail(exposed);
        Ok(())
    }

    pub(crate) fn seek(&self, node: Ino, offset: u64, whence: u32) -> Answer<u64> {
        seek(&self.volume, node, offset, whence)
    }

    /// Whether a file may have holes. Pages that programs stored into make no difference to a file
    /// without holes.
    pub(crate) fn has_holes(&self, node: Ino) -> bool {
        self.volume.files().may_have_holes(node)
    }

    /// The answer of [`Files::seek`] for a file without holes, where the contents of its pages are
    /// not known.
    pub(crate) fn seek_without_holes(&self, node: Ino, offset: u64, whence: u32) -> Answer<u64> {
        let (from, data) = seek_target(offset, whence)?;
        let size = answer(self.volume.attributes().getattr(node))?.size_bytes;
        if from >= size {
            return Err(Errno::NXIO);
        }
        Ok(if data { from } else { size })
    }

    /// Copies a range. Answers the number of copied bytes, which is below 4 GiB.
    pub(crate) fn copy_range(
        &self,
        from: (Ino, u64),
        to: (Ino, u64),
        len: u64,
        requester: Requester,
    ) -> Answer<u32> {
        self.prefetcher.touched(to.0, Touch::Size)?;
        self.pages.note_resized(to.0);
        let exposed = self.pages.expose(to.0, to.1);
        let writer = || credentials_of(requester);
        let copied = self.volume.files().copy_range(from, to, len, Some(&writer));
        self.cleared(to.0, copied.as_ref().map_or(true, |copied| copied.cleared));
        let bytes = answer(copied)?.bytes;
        if bytes > 0 {
            self.pages.clear_tail(exposed);
        }
        Ok(u32::try_from(bytes).expect("at most 4 GiB at a time"))
    }

    /// Tells the kernel of changed attributes, if `cleared`: a change of the contents cleared
    /// setuid or setgid, or took capabilities away. Otherwise the kernel would keep them, since it
    /// believes its cache. It knows before the change is answered.
    fn cleared(&self, node: Ino, cleared: bool) {
        if cleared {
            self.kernel
                .invalidate_attributes(&[Invalidation::Attributes(node)]);
        }
    }

    pub(crate) fn setxattr(
        &self,
        node: Ino,
        (name, value): (&[u8], &[u8]),
        flags: u32,
        extra_flags: u32,
    ) -> Answer<()> {
        if extra_flags & abi::setxattr::ACL_KILL_SGID != 0 {
            return answer(self.volume.attributes().set_list(node, name, value, true));
        }
        let flags = XattrFlags::from_bits_retain(flags);
        let mode = if flags == XattrFlags::CREATE {
            SetXattr::Create
        } else if flags == XattrFlags::REPLACE {
            SetXattr::Replace
        } else if flags.is_empty() {
            SetXattr::Any
        } else {
            return Err(Errno::INVAL);
        };
        answer(self.volume.attributes().setxattr(node, name, value, mode))
    }

    pub(crate) fn getxattr(&self, node: Ino, name: &[u8]) -> Answer<Vec<u8>> {
        if node == PROBE_INO {
            failpoints::die_at("probe-capabilities");
            if name == CAPABILITY {
                self.probe_file.asked_for_capabilities();
            }
            return Err(Errno::NODATA);
        }
        if name == CAPABILITY {
            self.prefetcher.touched(node, Touch::Fills)?;
        }
        answer(self.volume.attributes().getxattr(node, name)).map(|value| value.to_vec())
    }

    /// Names of extended attributes, each with a zero behind it.
    pub(crate) fn listxattr(&self, node: Ino, requester: Requester) -> Answer<Vec<u8>> {
        let mut list = Vec::new();
        let mut shows_trusted = None;
        for name in answer(self.volume.attributes().listxattr(node, true))? {
            let is_shown = !name.starts_with(b"trusted.")
                || *shows_trusted.get_or_insert_with(|| {
                    let caller = caller_of(requester);
                    caller.capabilities.have(Capabilities::SYS_ADMIN)
                });
            if !is_shown {
                continue;
            }
            list.extend_from_slice(&name);
            list.push(0);
        }
        Ok(list)
    }

    pub(crate) fn removexattr(&self, node: Ino, name: &[u8]) -> Answer<()> {
        answer(self.volume.attributes().removexattr(node, name))
    }
}

/// Sets attributes of an inode, on any thread.
pub(crate) fn set_attributes(
    volume: &Volume,
    node: Ino,
    set: &SetAttr,
    requester: Requester,
) -> Answer<Attr> {
    let writer = || credentials_of(requester);
    answer(volume.attributes().setattr(node, set, Some(&writer)))
}

/// Finds data or a hole, on any thread.
pub(crate) fn seek(volume: &Volume, node: Ino, offset: u64, whence: u32) -> Answer<u64> {
    let (offset, data) = seek_target(offset, whence)?;
    answer(volume.files().seek(node, offset, data))
}

/// The offset from which LSEEK searches, and whether it searches for data or for a hole.
fn seek_target(offset: u64, whence: u32) -> Answer<(u64, bool)> {
    const SEEK_DATA: u32 = 3;
    const SEEK_HOLE: u32 = 4;
    // An offset in the kernel is signed.
    if i64::try_from(offset).is_err() {
        return Err(Errno::NXIO);
    }
    match whence {
        SEEK_DATA => Ok((offset, true)),
        SEEK_HOLE => Ok((offset, false)),
        _ => Err(Errno::INVAL),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};

    use ramet_block::{Device, MemDevice};
    use ramet_fs::{FormatOptions, Kind, NewInode, OpenOptions, ROOT_INO};

    use super::*;
    use crate::server::server::Server;

    const OLD_BYTES: usize = 100;
    const NEW_BYTES: u64 = 9000;
    /// Bytes that a mapping stores from the beginning of the page on, also behind the end.
    const STORED_BYTES: usize = 200;

    /// A request that makes a file grow from `OLD_BYTES` to `NEW_BYTES`.
    type Grow = fn(&Files, Ino, Requester);

    /// The contents of a file whose page the kernel writes back after the volume has grown, and
    /// before the request that makes it grow is answered; `None` if the answer came first.
    fn written_back_during(grow: Grow) -> Option<Vec<u8>> {
        let device: Arc<dyn Device> = Arc::new(MemDevice::new(64 << 20));
        Volume::format(&device, &FormatOptions::default()).unwrap();
        let volume = Volume::open(device, OpenOptions::default()).unwrap();
        let kernel = Kernel::default();
        // A pipe that is full holds zeros up, as the lock of a page does.
        let (held, to_kernel) = std::io::pipe().unwrap();
        rustix::io::write(&to_kernel, &vec![0; 1 << 16]).unwrap();
        kernel.connect(Arc::new(to_kernel.into()));
        let server = Server::new(Arc::clone(&volume), kernel).unwrap();
        // The pipe ends before the server, which waits for its threads.
        let _held = held;
        let new = NewInode::new(Kind::Regular, 0o644);
        let node = volume.names().create(ROOT_INO, b"file", &new).unwrap().ino;
        let stored = [7; STORED_BYTES];
        let files = &server.files;
        let requester = Requester {
            uid: 0,
            gid: 0,
            pid: std::process::id(),
        };
        let handle = FileHandle::default();
        let old = &stored[..OLD_BYTES];
        files
            .write((node, handle), 0, old, (0, 0), requester)
            .unwrap();
        let is_answered = AtomicBool::new(false);
        let is_in_time = std::thread::scope(|threads| {
            threads.spawn(|| {
                grow(files, node, requester);
                is_answered.store(true, Ordering::SeqCst);
            });
            while files.getattr(node).unwrap().size_bytes < NEW_BYTES {
                std::thread::yield_now();
            }
            let flags = (abi::write::CACHE, 0);
            files
                .write((node, handle), 0, &stored, flags, requester)
                .unwrap();
            !is_answered.load(Ordering::SeqCst)
        });
        let mut contents = vec![0; STORED_BYTES];
        let read = volume.files().read_into(node, 0, &mut contents).unwrap();
        assert_eq!(read, STORED_BYTES);
        is_in_time.then_some(contents)
    }

    #[test]
    fn bytes_behind_an_old_end_that_are_written_back_before_the_growth_is_answered_are_zeros() {
        let grows: [Grow; 3] = [
            |files, node, requester| {
                let set = SetAttr {
                    size_bytes: Some(NEW_BYTES),
                    ..SetAttr::default()
                };
                files.setattr(node, (&set, false), requester).unwrap();
            },
            |files, node, requester| {
                let (handle, at) = (FileHandle::default(), NEW_BYTES - 1);
                files
                    .write((node, handle), at, b"x", (0, 0), requester)
                    .unwrap();
            },
            |files, node, requester| {
                files.fallocate(node, (0, NEW_BYTES), 0, requester).unwrap();
            },
        ];
        for grow in grows {
            let contents = std::iter::repeat_with(|| written_back_during(grow))
                .find_map(|contents| contents)
                .unwrap();
            let (old, behind) = contents.split_at(OLD_BYTES);
            assert_eq!((old, behind), (&[7; OLD_BYTES][..], &[0; 100][..]));
        }
    }
}
