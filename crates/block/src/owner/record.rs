//! The bytes of an owner block. All fields lie in one sector, which no power cut tears.

use std::fmt;

use crate::encoding::{DecodeError, Reader, Writer};
use crate::{BLOCK_BYTES, checksum};

const MAGIC: [u8; 8] = *b"RAMETown";
const BYTES: usize = BLOCK_BYTES as usize;
const SECTOR_BYTES: usize = 512;
const CHECKSUM_AT: usize = SECTOR_BYTES - 8;
const FIELDS_END: usize = 144;
const HOST_BYTES: usize = 64;

const KIND_FREE: u32 = 0;
const KIND_CLAIM: u32 = 1;
const KIND_PULSE: u32 = 2;
const KIND_INTENT: u32 = 3;

const _: () = assert!(FIELDS_END <= CHECKSUM_AT);

/// Numbers that tell a process from others, on any machine.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Process {
    /// Random number of the boot of its machine.
    pub boot_id: [u8; 16],
    /// Inode number of the PID namespace that its id is of.
    pub pid_namespace: u64,
    /// Inode number of the time namespace that its start time is of.
    pub time_namespace: u64,
    /// Its id.
    pub pid: u32,
    /// When it started, in clock ticks since the boot.
    pub start_ticks: u64,
}

/// One opening of a volume for writing.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Owner {
    /// Random number of this opening.
    pub id: [u8; 16],
    /// The process.
    pub process: Process,
    /// Name of its machine, for people; cut to 64 bytes.
    pub host: String,
}

impl fmt::Display for Owner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "process {} of {}", self.process.pid, self.host)
    }
}

/// The contents of an owner block.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum OwnerBlock {
    /// The volume has no owner. A block that was never written, all zeros, says the same.
    Free,
    /// The volume has this owner.
    Claim(Owner),
    /// This owner is alive. The number is another one each time.
    Pulse(Owner, u64),
    /// This opening wants to become the owner.
    Intent(Owner),
}

impl OwnerBlock {
    /// The 4096 bytes on disk.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let nobody = Owner::default();
        let (kind, owner, counter) = match self {
            OwnerBlock::Free => (KIND_FREE, &nobody, 0),
            OwnerBlock::Claim(owner) => (KIND_CLAIM, owner, 0),
            OwnerBlock::Pulse(owner, counter) => (KIND_PULSE, owner, *counter),
            OwnerBlock::Intent(owner) => (KIND_INTENT, owner, 0),
        };
        let process = &owner.process;
        let mut w = Writer::with_capacity(BYTES);
        w.raw(&MAGIC);
        w.u32(kind);
        w.u32(process.pid);
        w.raw(&owner.id);
        w.raw(&process.boot_id);
        w.u64(process.pid_namespace);
        w.u64(process.time_namespace);
        w.u64(process.start_ticks);
        w.u64(counter);
        w.raw(&owner.host.as_bytes()[..owner.host.floor_char_boundary(HOST_BYTES)]);
        w.pad_to(FIELDS_END);
        w.pad_to(CHECKSUM_AT);
        let sum = checksum(w.as_slice());
        w.u64(sum);
        w.pad_to(BYTES);
        w.into_vec()
    }

    /// Decodes the 4096 bytes of a block.
    ///
    /// # Errors
    /// The fault, in words.
    pub fn decode(bytes: &[u8]) -> Result<Self, String> {
        if bytes.len() != BYTES {
            return Err(format!("{} bytes instead of {BYTES}", bytes.len()));
        }
        if bytes.iter().all(|byte| *byte == 0) {
            return Ok(OwnerBlock::Free);
        }
        if !bytes.starts_with(&MAGIC) {
            return Err("no magic bytes".into());
        }
        let malformed = |error: DecodeError| error.to_string();
        let (body, rest) = bytes.split_at(CHECKSUM_AT);
        let (sum, rest) = rest.split_at(SECTOR_BYTES - CHECKSUM_AT);
        let (found, expected) = (Reader::new(sum).u64().map_err(malformed)?, checksum(body));
        if found != expected {
            return Err(format!("checksum {found:#018x}, computed {expected:#018x}"));
        }
        if rest.iter().any(|byte| *byte != 0) {
            return Err("reserved bytes are not zero".into());
        }
        Self::decode_fields(Reader::new(&body[MAGIC.len()..])).map_err(malformed)
    }

    fn decode_fields(mut r: Reader<'_>) -> Result<Self, DecodeError> {
        let kind = r.u32()?;
        let pid = r.u32()?;
        let id_at = |r: &mut Reader<'_>| -> Result<[u8; 16], DecodeError> {
            let mut id = [0; 16];
            id.copy_from_slice(r.take(16)?);
            Ok(id)
        };
        let id = id_at(&mut r)?;
        let boot_id = id_at(&mut r)?;
        let process = Process {
            boot_id,
            pid,
            pid_namespace: r.u64()?,
            time_namespace: r.u64()?,
            start_ticks: r.u64()?,
        };
        let counter = r.u64()?;
        let host = r.take(HOST_BYTES)?;
        let len = host
            .iter()
            .rposition(|byte| *byte != 0)
            .map_or(0, |at| at + 1);
        let owner = Owner {
            id,
            process,
            host: String::from_utf8_lossy(&host[..len]).into_owned(),
        };
        r.finish_reserved()?;
        let unknown = |field, found| Err(DecodeError::Value { field, found });
        match kind {
            KIND_FREE if owner == Owner::default() && counter == 0 => Ok(OwnerBlock::Free),
            KIND_CLAIM if counter == 0 => Ok(OwnerBlock::Claim(owner)),
            KIND_PULSE => Ok(OwnerBlock::Pulse(owner, counter)),
            KIND_INTENT if counter == 0 => Ok(OwnerBlock::Intent(owner)),
            KIND_FREE | KIND_CLAIM | KIND_INTENT => unknown("counter of an owner block", counter),
            kind => unknown("kind of an owner block", kind.into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn owner() -> Owner {
        Owner {
            id: *b"0123456789abcdef",
            process: Process {
                boot_id: *b"fedcba9876543210",
                pid_namespace: 0xf000_0001,
                time_namespace: 0xf000_0002,
                pid: 77,
                start_ticks: 1234,
            },
            host: "somewhere".into(),
        }
    }

    #[test]
    fn bytes_of_an_owner_block_are_pinned() {
        let bytes = OwnerBlock::Pulse(owner(), 5).encode();
        let mut want = Vec::new();
        want.extend_from_slice(b"RAMETown\x02\0\0\0\x4d\0\0\0");
        want.extend_from_slice(b"0123456789abcdeffedcba9876543210");
        for word in [0xf000_0001u64, 0xf000_0002, 1234, 5] {
            want.extend_from_slice(&word.to_le_bytes());
        }
        want.extend_from_slice(b"somewhere");
        want.resize(CHECKSUM_AT, 0);
        want.extend_from_slice(&GOLDEN_SUM.to_le_bytes());
        want.resize(4096, 0);
        assert_eq!(checksum(&want[..CHECKSUM_AT]), GOLDEN_SUM);
        assert_eq!(bytes, want);
    }

    const GOLDEN_SUM: u64 = 0xbd07_c697_64fe_5bf8;

    #[test]
    fn every_kind_survives_and_zeros_are_free() {
        for block in [
            OwnerBlock::Free,
            OwnerBlock::Claim(owner()),
            OwnerBlock::Pulse(owner(), 9),
            OwnerBlock::Intent(owner()),
        ] {
            assert_eq!(OwnerBlock::decode(&block.encode()), Ok(block));
        }
        assert_eq!(OwnerBlock::decode(&[0; 4096]), Ok(OwnerBlock::Free));
    }

    #[test]
    fn every_flipped_byte_is_noticed() {
        let good = OwnerBlock::Claim(owner()).encode();
        for at in 0..good.len() {
            let mut bad = good.clone();
            bad[at] ^= 0x40;
            assert!(OwnerBlock::decode(&bad).is_err(), "byte {at}");
        }
    }

    #[test]
    fn nonsense_under_a_valid_checksum_is_refused() {
        // Offset and value: unknown kind, counter of a claim, reserved byte.
        for (at, value) in [(8, 9), (72, 1), (150, 1)] {
            let mut bytes = OwnerBlock::Claim(owner()).encode();
            bytes[at] = value;
            let sum = checksum(&bytes[..CHECKSUM_AT]);
            bytes[CHECKSUM_AT..SECTOR_BYTES].copy_from_slice(&sum.to_le_bytes());
            assert!(OwnerBlock::decode(&bytes).is_err(), "byte {at}");
        }
    }

    #[test]
    fn a_long_name_is_cut_between_characters() {
        let long = Owner {
            host: "ä".repeat(40),
            ..owner()
        };
        let Ok(OwnerBlock::Claim(found)) = OwnerBlock::decode(&OwnerBlock::Claim(long).encode())
        else {
            panic!("not a claim");
        };
        assert_eq!(found.host, "ä".repeat(32));
    }
}
