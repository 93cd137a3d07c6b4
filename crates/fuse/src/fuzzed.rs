//! Requests as bytes, answered without a kernel.

use std::sync::Arc;
use std::sync::mpsc::channel;

use ramet_fs::Volume;

use crate::cache::notify::Kernel;
use crate::protocol::abi;
use crate::protocol::negotiate::Version;
use crate::protocol::{Answer, Body, Form, Header, Malformed, Reply, Request};
use crate::server::server::Server;

/// Room for answers, in bytes.
const ROOM_BYTES: usize = 16 << 10;

/// The server of a volume.
pub struct Requests {
    server: Server,
    form: Form,
}

impl Requests {
    /// A server of `volume`, for a kernel that offers `capabilities` of [`abi::init`], with or
    /// without rings.
    ///
    /// # Errors
    /// The system has no more threads.
    pub fn new(volume: Arc<Volume>, capabilities: u64, ring: bool) -> std::io::Result<Self> {
        let init = abi::InitIn {
            major: abi::VERSION.0,
            minor: abi::VERSION.1,
            flags: capabilities as u32,
            flags2: (capabilities >> 32) as u32,
            ..abi::InitIn::default()
        };
        let Version::Ours(offer) = Version::of(init) else {
            unreachable!("the version is ours");
        };
        let server = Server::new(volume, Kernel::default())?;
        let agreed = offer.take(ring, true);
        server.agree(agreed);
        Ok(Self {
            server,
            form: agreed.form(),
        })
    }

    /// The whole answer to a message as the kernel would send it; `None` if the request gets no
    /// answer.
    ///
    /// # Panics
    /// When the two transports would decode the message differently, or the answer is
    /// longer than its room.
    #[must_use]
    pub fn answer(&self, message: &[u8]) -> Option<Vec<u8>> {
        let header = Header::decode(message)?;
        let mut buffer = message.to_vec();
        buffer.resize(message.len() + ROOM_BYTES, 0);
        self.decode_as_ring(&header, message, &mut buffer.clone());
        let request = Request::decode(&header, &mut buffer, message.len(), self.form);
        let reply = match request {
            Ok(request) => self.reply(&header, request)?,
            Err(_) => Reply::error(rustix::io::Errno::INVAL),
        };
        let room_at = abi::InHeader::BYTES + abi::ReadIn::BYTES;
        let body = match reply.body() {
            Body::Empty => &[][..],
            Body::Room(bytes) => &buffer[room_at..][..*bytes],
            Body::Bytes(bytes) => bytes,
        };
        let answer = [&reply.front(header.unique)[..], body].concat();
        let out = abi::OutHeader::decode(&answer).expect("an answer has a header");
        assert_eq!(out.len as usize, answer.len());
        Some(answer)
    }

    /// A ring hands the same request over in parts. Both forms decode to the same request.
    fn decode_as_ring(&self, header: &Header, message: &[u8], buffer: &mut [u8]) {
        let Some(bytes) = abi::structure_bytes(header.opcode, self.form.has_setxattr_ext) else {
            return;
        };
        let behind = abi::InHeader::BYTES + bytes;
        if message.len() < behind {
            return;
        }
        let mut structure = [0xff; 128];
        structure[..bytes].copy_from_slice(&message[abi::InHeader::BYTES..behind]);
        let mut payload = buffer[behind..].to_vec();
        let len = message.len() - behind;
        let ring = Request::decode_parts(header, &structure, &mut payload, len, self.form);
        let device = Request::decode(header, buffer, message.len(), self.form);
        // The device compares the length in the header with the bytes that were read; a ring has no
        // header length to compare.
        if device != Err(Malformed::Short(header.opcode)) {
            assert_eq!(ring, device);
        }
    }

    fn reply(&self, header: &Header, request: Request<'_>) -> Option<Reply> {
        match request {
            Request::Ioctl {
                number,
                data,
                out_bytes,
                ..
            } => {
                let call = (number, data);
                let answer = self.server.ioctl_at_once(header, call).unwrap_or_else(|| {
                    let untold = self.server.ioctl_untold(header, call);
                    untold.map(|(_, data)| data)
                });
                Some(Reply::of_ioctl(answer, out_bytes))
            }
            Request::Fsync { .. } | Request::Fsyncdir { .. } => {
                let (sender, synced) = channel();
                self.server.count(header.opcode);
                self.server.sync(header.node, move |answer: Answer<()>| {
                    sender.send(answer).expect("the receiver waits");
                });
                Some(Reply::from(synced.recv().expect("a sync is answered")))
            }
            request => self.server.answer(header, request),
        }
    }
}
