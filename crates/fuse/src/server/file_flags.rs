//! The ioctls of chattr(1), lsattr(1) and xfs_io(8): the flags of a file or directory, its
//! generation, and the label of its volume.
//!
//! The kernel has checked that the caller owns the inode, and that only a process with
//! `CAP_LINUX_IMMUTABLE` changes its protection. Each number has one direction; the structures are
//! in the byte order of the machine.
//!
//! | number | structure |
//! | --- | --- |
//! | FS_IOC_GETFLAGS, FS_IOC_SETFLAGS | flags `FS_*_FL`, u32 |
//! | FS_IOC_GETVERSION | low half of the generation, as in handles of the kernel, u32 |
//! | FS_IOC_GETFSLABEL | label of the volume, 256 bytes that zeros fill up |
//! | FS_IOC_FSGETXATTR, FS_IOC_FSSETXATTR | `struct fsxattr`: flags `FS_XFLAG_*`, hints about extents, project, each u32; 8 reserved bytes |

use ramet_fs::{FileFlags, Ino, Invalidation, Volume};
use rustix::io::Errno;

use crate::cache::notify::Kernel;
use crate::protocol::{Answer, answer};

const GET_FLAGS: u32 = 0x8008_6601;
const SET_FLAGS: u32 = 0x4008_6602;
const GET_GENERATION: u32 = 0x8008_7601;
const GET_ATTRIBUTES: u32 = 0x801c_581f;
const SET_ATTRIBUTES: u32 = 0x401c_5820;
const FSXATTR_BYTES: usize = 28;
const GET_LABEL: u32 = 0x8100_9431;
const LABEL_BYTES: usize = 256;
/// Of `struct fsxattr`: the number of extents, which nobody sets.
const EXTENTS: std::ops::Range<usize> = 8..12;

/// A call about the flags or the generation of an inode, or about the label of its volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FlagCall {
    /// Tells the flags, in this form.
    Get(Form),
    /// Tells the generation.
    GetGeneration,
    /// Tells the label of the volume.
    GetLabel,
    /// Sets the flags.
    Set(FileFlags),
}

/// The structure of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Form {
    /// Flags `FS_*_FL`.
    Flags,
    /// `struct fsxattr`.
    Fsxattr,
}

impl Form {
    /// The bits of immutable, append-only, without access times, not dumped.
    fn bits(self) -> [u32; 4] {
        match self {
            Self::Flags => [0x10, 0x20, 0x80, 0x40],
            Self::Fsxattr => [0x8, 0x10, 0x40, 0x80],
        }
    }

    /// The bits of these flags.
    fn encode(self, flags: FileFlags) -> u32 {
        let set = [
            flags.immutable,
            flags.append_only,
            flags.no_atime,
            flags.no_dump,
        ];
        let bits = self.bits().into_iter().zip(set);
        bits.filter(|(_, is_set)| *is_set)
            .fold(0, |all, (bit, _)| all | bit)
    }

    /// The flags of these bits.
    ///
    /// # Errors
    /// `EOPNOTSUPP` for any other bit.
    fn decode(self, bits: u32) -> Answer<FileFlags> {
        let [immutable, append_only, no_atime, no_dump] = self.bits();
        if bits & !(immutable | append_only | no_atime | no_dump) != 0 {
            return Err(Errno::OPNOTSUPP);
        }
        Ok(FileFlags {
            immutable: bits & immutable != 0,
            append_only: bits & append_only != 0,
            no_atime: bits & no_atime != 0,
            no_dump: bits & no_dump != 0,
        })
    }
}

impl FlagCall {
    /// The call of an ioctl; `None` for the number of another ioctl.
    pub(crate) fn decode(number: u32, data: &[u8]) -> Option<Answer<Self>> {
        Some(match number {
            GET_FLAGS => Ok(Self::Get(Form::Flags)),
            GET_GENERATION => Ok(Self::GetGeneration),
            GET_LABEL => Ok(Self::GetLabel),
            GET_ATTRIBUTES => Ok(Self::Get(Form::Fsxattr)),
            SET_FLAGS => decode_set(Form::Flags, data),
            SET_ATTRIBUTES => decode_set(Form::Fsxattr, data),
            _ => return None,
        })
    }

    /// Whether the call begins or goes on to protect the inode.
    pub(crate) fn protects(&self) -> bool {
        matches!(self, Self::Set(flags) if flags.immutable || flags.append_only)
    }

    /// Carries the call out, and answers its data. The kernel hears of a new time of change.
    ///
    /// # Errors
    /// The errno of the call.
    pub(crate) fn run(&self, volume: &Volume, kernel: &Kernel, node: Ino) -> Answer<Vec<u8>> {
        let Self::Set(flags) = *self else {
            return self.tell(volume, node);
        };
        answer(volume.attributes().set_flags(node, flags))?;
        kernel.invalidate_attributes(&[Invalidation::Attributes(node)]);
        Ok(Vec::new())
    }

    /// The data of a call that changes nothing.
    ///
    /// # Errors
    /// `EROFS` for another call, and the errno of the call.
    pub(crate) fn tell(&self, volume: &Volume, node: Ino) -> Answer<Vec<u8>> {
        match *self {
            Self::Set(_) => Err(Errno::ROFS),
            Self::GetGeneration => {
                let generation = answer(volume.attributes().getattr(node))?.generation;
                // The kernel keeps 32 bits of it.
                Ok((generation as u32).to_ne_bytes().to_vec())
            }
            Self::GetLabel => {
                let label = volume.tree().stats().label;
                let mut data = label.as_str().as_bytes().to_vec();
                data.resize(LABEL_BYTES, 0);
                Ok(data)
            }
            Self::Get(form) => {
                let flags = answer(volume.attributes().flags(node))?;
                let mut data = form.encode(flags).to_ne_bytes().to_vec();
                if form == Form::Fsxattr {
                    data.resize(FSXATTR_BYTES, 0);
                }
                Ok(data)
            }
        }
    }
}

fn decode_set(form: Form, data: &[u8]) -> Answer<FlagCall> {
    let (bits, rest) = data.split_first_chunk().ok_or(Errno::INVAL)?;
    let is_zero = |at: usize| EXTENTS.contains(&(at + bits.len())) || rest[at] == 0;
    let has_length = match form {
        // The kernel hands over four bytes, although the number tells eight.
        Form::Flags => true,
        Form::Fsxattr => data.len() == FSXATTR_BYTES,
    };
    if !has_length {
        return Err(Errno::INVAL);
    }
    // No file has a project, nor hints about the size of its extents.
    if form == Form::Fsxattr && !(0..rest.len()).all(is_zero) {
        return Err(Errno::OPNOTSUPP);
    }
    form.decode(u32::from_ne_bytes(*bits)).map(FlagCall::Set)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flags_have_the_bits_that_the_kernel_gives_them() {
        let all = FileFlags {
            immutable: true,
            append_only: true,
            no_atime: true,
            no_dump: true,
        };
        assert_eq!(Form::Flags.encode(all), 0xf0);
        assert_eq!(Form::Fsxattr.encode(all), 0xd8);
        for (bit, of_ext4, of_xfs) in [
            (
                FileFlags {
                    immutable: true,
                    ..FileFlags::default()
                },
                0x10,
                0x8,
            ),
            (
                FileFlags {
                    append_only: true,
                    ..FileFlags::default()
                },
                0x20,
                0x10,
            ),
            (
                FileFlags {
                    no_dump: true,
                    ..FileFlags::default()
                },
                0x40,
                0x80,
            ),
            (
                FileFlags {
                    no_atime: true,
                    ..FileFlags::default()
                },
                0x80,
                0x40,
            ),
        ] {
            for (form, bits) in [(Form::Flags, of_ext4), (Form::Fsxattr, of_xfs)] {
                assert_eq!(form.encode(bit), bits);
                assert_eq!(form.decode(bits), Ok(bit));
            }
        }
    }

    #[test]
    fn requests_for_more_than_there_is_are_refused() {
        let set = |number, data: &[u8]| FlagCall::decode(number, data);
        assert_eq!(set(0x1234, &[]), None);
        assert_eq!(set(SET_FLAGS, &[0; 3]), Some(Err(Errno::INVAL)));
        let sync = 8u32.to_ne_bytes();
        assert_eq!(set(SET_FLAGS, &sync), Some(Err(Errno::OPNOTSUPP)));
        let none = FlagCall::Set(FileFlags::default());
        assert_eq!(set(SET_FLAGS, &[0; 4]), Some(Ok(none)));
        let mut attributes = [0; FSXATTR_BYTES];
        assert_eq!(
            set(SET_ATTRIBUTES, &attributes[..27]),
            Some(Err(Errno::INVAL))
        );
        attributes[EXTENTS.start] = 9;
        assert_eq!(set(SET_ATTRIBUTES, &attributes), Some(Ok(none)));
        for hint in [4, 12, 16] {
            let mut attributes = attributes;
            attributes[hint] = 1;
            let refused = set(SET_ATTRIBUTES, &attributes);
            assert_eq!(refused, Some(Err(Errno::OPNOTSUPP)), "{hint}");
        }
    }
}
