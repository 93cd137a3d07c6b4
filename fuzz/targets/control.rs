//! Control calls with arbitrary bytes on a valid file system, and answers that are nonsense.
//!
//! Whatever was asked for, the file system must keep its invariants.
#![no_main]

use std::sync::Arc;

use arbitrary::{Result, Unstructured};
use libfuzzer_sys::fuzz_target;
use ramet_block::Device;
use ramet_fs::control::{
    CLONE, CLONE_BYTES, CloneRequest, DIFF, DIFF_PAGE_BYTES, DIFF_START, DiffRequest,
    NAME_REQUEST_BYTES, NameRequest, REMOVE, SOURCE, decode_diff_page, decode_source_reply,
    decode_stat_reply, decode_usage,
};
use ramet_fs::{Caller, ControlState, Difference, Ino, ROOT_INO, Volume};
use ramet_fuse::Controls;
use ramet_fuzz::{base, open_files};

/// Each may double what is below a directory.
const CALLS_MAX: usize = 10;

fuzz_target!(|data: &[u8]| {
    let mut u = Unstructured::new(data);
    if u.ratio(1u8, 8).unwrap_or_default() {
        decode_answers(data);
        return;
    }
    let device: Arc<dyn Device> = Arc::new(base(2).device());
    let volume = open_files(device).expect("the base is valid");
    // Too few bytes are fewer calls.
    let _ = call_all(&mut u, &volume);
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

fn decode_answers(data: &[u8]) {
    let _ = decode_diff_page(data);
    let _ = decode_stat_reply(data);
    let _ = decode_usage(data);
    let _ = decode_source_reply(data);
    let mut rest = data;
    while let Ok(Some((_, len))) = Difference::decode(rest) {
        rest = &rest[len..];
    }
    if let Ok(request) = CloneRequest::decode(data) {
        let bytes = request.encode().expect("its name is short");
        assert_eq!(CloneRequest::decode(&bytes).expect("as above"), request);
    }
}

fn call_all(u: &mut Unstructured<'_>, volume: &Arc<Volume>) -> Result<()> {
    let controls = Controls::new(volume.clone());
    let mut dirs: Vec<(Ino, Option<ControlState>)> = Vec::new();
    let names: [&[u8]; 3] = [b".", b"dir", b"copy"];
    for name in names {
        let ino = volume
            .names()
            .lookup(ROOT_INO, name)
            .expect("of the base")
            .ino;
        dirs.push((ino, Some(ControlState::default())));
    }
    let dir = dirs[1].0;
    let file = volume.names().lookup(dir, b"two").expect("of the base").ino;
    // Not directories: the kernel asks on any descriptor.
    dirs.extend([(file, None), (Ino(u.arbitrary()?), None)]);
    let mut token = 0;
    for _ in 0..CALLS_MAX {
        if u.is_empty() {
            break;
        }
        let (number, bytes) = request(u, token)?;
        let (ino, state) = u.choose(&dirs)?;
        let caller = match *u.choose(&[0, 0, 0, 1000])? {
            0 => Caller::root(),
            uid => Caller::user(uid, *u.choose(&[0, 1000])?),
        };
        let answer = controls.call(number, &bytes, (*ino, state.as_ref()), &caller);
        if let (SOURCE, Some(Ok(answer))) = (number, &answer) {
            token = decode_source_reply(answer)
                .expect("an answer decodes")
                .token;
        }
        if let (DIFF, Some(Ok(answer))) = (number, &answer) {
            decode_diff_page(answer).expect("an answer decodes");
        }
    }
    for name in names {
        volume.forget(
            volume
                .names()
                .lookup(ROOT_INO, name)
                .map_or(Ino(0), |a| a.ino),
            1,
        );
    }
    Ok(())
}

/// A call, mostly one that decodes.
fn request(u: &mut Unstructured<'_>, token: u64) -> Result<(u32, Vec<u8>)> {
    let token = if u.ratio(7u8, 8)? {
        token
    } else {
        u.arbitrary()?
    };
    Ok(match u.int_in_range(0..=9u8)? {
        0 | 1 => {
            let name = name(u)?;
            let encoded = NameRequest { name }.encode();
            (SOURCE, encoded.map_or_else(|_| vec![0; 4], |b| b.to_vec()))
        }
        2..=4 => {
            let request = CloneRequest {
                flags: u.int_in_range(0..=4)?,
                source: token,
                name: name(u)?,
            };
            let encoded = request.encode();
            (CLONE, encoded.map_or_else(|_| vec![0; 4], |b| b.to_vec()))
        }
        5 => {
            let name = name(u)?;
            let encoded = NameRequest { name }.encode();
            (REMOVE, encoded.map_or_else(|_| vec![0; 4], |b| b.to_vec()))
        }
        6 | 7 => {
            let flags = *u.choose(&[0, DIFF_START, DIFF_START, 2])?;
            let other = token;
            (DIFF, DiffRequest { flags, other, session: 1 }.encode())
        }
        8 => {
            // Any number with any bytes.
            let number = *u.choose(&NUMBERS)?;
            let len = *u.choose(&[0, CLONE_BYTES, NAME_REQUEST_BYTES, DIFF_PAGE_BYTES, 7])?;
            let mut bytes = u.bytes(u.len().min(40))?.to_vec();
            bytes.resize(len, 0);
            (number, bytes)
        }
        _ => (*u.choose(&NUMBERS)?, Vec::new()),
    })
}

const NUMBERS: [u32; 10] = [
    ramet_fs::control::SCRUB,
    CLONE,
    REMOVE,
    SOURCE,
    DIFF,
    ramet_fs::control::SYNC,
    ramet_fs::control::STAT,
    ramet_fs::control::CHECKPOINT,
    ramet_fs::control::USAGE,
    0x5401,
];

fn name(u: &mut Unstructured<'_>) -> Result<Vec<u8>> {
    let known: [&[u8]; 9] = [
        b".", b"..", b"dir", b"copy", b"two", b"hard", b"link", b"new", b"three",
    ];
    if u.ratio(3u8, 4)? {
        return Ok(u.choose(&known)?.to_vec());
    }
    let len = *u.choose(&[0, 1, 3, 255, 256])?;
    Ok(vec![u.arbitrary()?; len])
}
