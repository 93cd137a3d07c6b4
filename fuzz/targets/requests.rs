//! Requests with arbitrary bytes, as from the kernel, on a valid file system.
//!
//! Whatever was asked for, the file system must keep its invariants.
#![no_main]

use std::sync::Arc;

use arbitrary::{Result, Unstructured};
use libfuzzer_sys::fuzz_target;
use ramet_block::Device;
use ramet_fs::ROOT_INO;
use ramet_fs::control::{DIFF, SCRUB, SOURCE, STAT, SYNC, USAGE};
use ramet_fuse::Requests;
use ramet_fuse::protocol::abi::{
    CreateIn, InHeader, IoctlIn, OpenOut, OutHeader, ReadIn, Rename2In, SetattrIn, WriteIn, init,
    opcode, structure_bytes,
};
use ramet_fuzz::{base, open_files};

const REQUESTS_MAX: usize = 40;
/// Known names and such that nothing has.
const NAMES: [&[u8]; 12] = [
    b".",
    b"..",
    b"dir",
    b"copy",
    b"again",
    b"two",
    b"hard",
    b"link",
    b"new",
    b"three",
    b"a/b",
    b"user.name",
];

fuzz_target!(|data: &[u8]| {
    let mut u = Unstructured::new(data);
    let device: Arc<dyn Device> = Arc::new(base(2).device());
    let volume = open_files(device).expect("the base is valid");
    let (capabilities, ring) = match u.arbitrary::<u8>().unwrap_or_default() % 4 {
        0 => (0, false),
        1 => (u64::MAX, false),
        2 => (u64::MAX, true),
        _ => (!init::SETXATTR_EXT, true),
    };
    let requests = Requests::new(Arc::clone(&volume), capabilities, ring).expect("few threads");
    let mut nodes: Vec<u64> = vec![ROOT_INO.0];
    let mut handles: Vec<u64> = vec![0];
    // Too few bytes are fewer requests.
    let _ = ask(&mut u, &requests, &mut nodes, &mut handles);
    drop(requests);
    volume.forget_all();
    assert_eq!(volume.controls().check().expect("memory does not fail"), []);
    let violations = volume
        .checkpoint()
        .map(|()| volume.tree().verify(&mut |_| {}));
    assert_eq!(
        violations.expect("there is room").expect("as above"),
        [""; 0]
    );
    volume.close().expect("there is room");
});

fn ask(
    u: &mut Unstructured<'_>,
    requests: &Requests,
    nodes: &mut Vec<u64>,
    handles: &mut Vec<u64>,
) -> Result<()> {
    for unique in 2..2 + REQUESTS_MAX as u64 {
        if u.is_empty() {
            break;
        }
        let operation = u.int_in_range(0..=opcode::COPY_FILE_RANGE_64 + 1)?;
        let message = message(u, operation, unique, nodes, handles)?;
        let Some(answer) = requests.answer(&message) else {
            continue;
        };
        let header = OutHeader::decode(&answer).expect("an answer has a header");
        assert!(header.unique == unique && (-4095..=0).contains(&header.error));
        assert!(header.error == 0 || header.len as usize == OutHeader::BYTES);
        learn(operation, &answer[OutHeader::BYTES..], nodes, handles);
    }
    Ok(())
}

/// Takes nodes and handles from an answer.
fn learn(operation: u32, answer: &[u8], nodes: &mut Vec<u64>, handles: &mut Vec<u64>) {
    match operation {
        opcode::LOOKUP
        | opcode::MKNOD
        | opcode::MKDIR
        | opcode::SYMLINK
        | opcode::LINK
        | opcode::CREATE => {
            let node = answer.first_chunk().map(|node| u64::from_ne_bytes(*node));
            nodes.extend(node.filter(|node| *node != 0));
        }
        opcode::OPENDIR => handles.extend(OpenOut::decode(answer).map(|open| open.fh)),
        _ => {}
    }
}

/// A request, mostly one that decodes.
fn message(
    u: &mut Unstructured<'_>,
    operation: u32,
    unique: u64,
    nodes: &[u64],
    handles: &[u64],
) -> Result<Vec<u8>> {
    let node = if u.ratio(15u8, 16)? {
        *u.choose(nodes)?
    } else {
        u.arbitrary()?
    };
    let mut body = structure(u, operation, nodes, handles)?;
    body.extend(payload(u, operation)?);
    let cut = if u.ratio(1u8, 16)? {
        u.choose_index(body.len() + 1)?
    } else {
        body.len()
    };
    body.truncate(cut);
    let header = InHeader {
        len: (InHeader::BYTES + body.len()) as u32,
        opcode: operation,
        unique,
        node,
        uid: *u.choose(&[0, 0, 1000])?,
        gid: *u.choose(&[0, 1000])?,
        pid: *u.choose(&[0, 7, 71])?,
        extensions: if u.ratio(1u8, 32)? { u.arbitrary()? } else { 0 },
        ..InHeader::default()
    };
    Ok([&header.encode()[..], &body].concat())
}

/// The structure of an operation: small numbers where large ones are refused, or anything.
fn structure(
    u: &mut Unstructured<'_>,
    operation: u32,
    nodes: &[u64],
    handles: &[u64],
) -> Result<Vec<u8>> {
    let fh = *u.choose(handles)?;
    let offset = if u.ratio(3u8, 4)? {
        u64::from(u.arbitrary::<u16>()?)
    } else {
        u.arbitrary()?
    };
    Ok(match operation {
        opcode::READ | opcode::READDIR | opcode::READDIRPLUS => {
            let size = if u.ratio(7u8, 8)? {
                u.int_in_range(0..=9000)?
            } else {
                u.arbitrary()?
            };
            let read = ReadIn {
                fh,
                offset,
                size,
                ..ReadIn::default()
            };
            read.encode().to_vec()
        }
        opcode::WRITE => {
            let write = WriteIn {
                fh,
                offset,
                size: u.int_in_range(0..=40)?,
                write_flags: u.int_in_range(0..=7)?,
                ..WriteIn::default()
            };
            write.encode().to_vec()
        }
        opcode::SETATTR if u.ratio(3u8, 4)? => {
            let set = SetattrIn {
                valid: u.int_in_range(0..=0xfff)?,
                size: offset,
                atime: u.arbitrary()?,
                atimensec: u.int_in_range(0..=1_000_000_000)?,
                mode: u.arbitrary()?,
                ..SetattrIn::default()
            };
            set.encode().to_vec()
        }
        opcode::RENAME2 => {
            let rename = Rename2In {
                newdir: *u.choose(nodes)?,
                flags: u.int_in_range(0..=8)?,
                padding: 0,
            };
            rename.encode().to_vec()
        }
        opcode::CREATE => {
            let create = CreateIn {
                mode: u.arbitrary()?,
                flags: u.arbitrary()?,
                ..CreateIn::default()
            };
            create.encode().to_vec()
        }
        opcode::RENAME | opcode::LINK => u.choose(nodes)?.to_ne_bytes().to_vec(),
        opcode::IOCTL => {
            let numbers = [DIFF, SCRUB, SOURCE, STAT, SYNC, USAGE];
            let cmd = if u.ratio(7u8, 8)? {
                *u.choose(&numbers)?
            } else {
                u.arbitrary()?
            };
            let in_size = if u.ratio(1u8, 2)? {
                cmd >> 16 & 0x3fff
            } else {
                u.int_in_range(0..=40)?
            };
            let call = IoctlIn {
                fh,
                cmd,
                in_size,
                out_size: cmd >> 16 & 0x3fff,
                ..IoctlIn::default()
            };
            call.encode().to_vec()
        }
        _ => {
            let has_ext = u.arbitrary()?;
            let len = structure_bytes(operation, has_ext).unwrap_or(16);
            let mut bytes = u.bytes(len.min(u.len()))?.to_vec();
            bytes.resize(len, 0);
            if u.ratio(3u8, 4)? {
                // Fields of 8 bytes become small.
                bytes
                    .chunks_exact_mut(8)
                    .for_each(|field| field[2..].fill(0));
            }
            bytes
        }
    })
}

fn payload(u: &mut Unstructured<'_>, operation: u32) -> Result<Vec<u8>> {
    let mut bytes = Vec::new();
    if operation == opcode::IOCTL {
        bytes.resize(u.int_in_range(0..=600)?, 0);
    }
    for _ in 0..u.int_in_range(0..=2)? {
        if u.ratio(7u8, 8)? {
            bytes.extend_from_slice(u.choose(&NAMES)?);
        } else {
            let len = *u.choose(&[0, 1, 3, 255, 256, 4096, 4097])?;
            bytes.resize(bytes.len() + len, u.arbitrary()?);
        }
        bytes.push(0);
    }
    let rest = u.int_in_range(0..=64)?;
    bytes.extend_from_slice(u.bytes(rest.min(u.len()))?);
    Ok(bytes)
}
