//! What every message between two ranks begins with: what the sender has called, so that the receiver can compare.

use drivetrain_core::communicator::transport::Descriptor;
use xxhash_rust::xxh3::xxh3_64;

/// Bytes of a frame: small parts travel within it.
pub(crate) const FRAME_BYTES: usize = 8192;

/// Bytes of it before the part.
const HEADER: usize = 256;
const TEXT: usize = 32;

/// Bytes of the largest part that travels in a frame.
pub(crate) const INLINE_BYTES: usize = FRAME_BYTES - HEADER;

/// A frame's memory.
#[derive(Debug)]
pub(crate) struct Frame(Box<[u64; FRAME_BYTES / 8]>);

/// What one rank has called, as others see it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Heading {
    /// What it is to the reader; cut where it is long.
    pub(crate) text: String,
    /// Of the whole text.
    hash: u64,
    pub(crate) sequence: u64,
}

impl Heading {
    /// Of a collective.
    pub(crate) fn of(descriptor: &Descriptor, sequence: u64) -> Self {
        Self::new(&descriptor.to_string(), sequence)
    }

    /// Of a message, whichever operation sends it.
    pub(crate) fn message(descriptor: &Descriptor, sequence: u64) -> Self {
        let text = format!("{} x {}", descriptor.dtype, descriptor.counts[0]);
        Self::new(&text, sequence)
    }

    fn new(text: &str, sequence: u64) -> Self {
        let mut cut = text.len().min(HEADER - TEXT);
        while !text.is_char_boundary(cut) {
            cut -= 1;
        }
        Self {
            text: text[..cut].to_owned(),
            hash: xxh3_64(text.as_bytes()),
            sequence,
        }
    }
}

impl Frame {
    pub(crate) fn new() -> Self {
        Self(Box::new([0; FRAME_BYTES / 8]))
    }

    /// Writes a heading, and a part of this many bytes if it is small. Returns how many bytes there are to send.
    pub(crate) fn write(&mut self, heading: &Heading, part: &[u8]) -> usize {
        let text = heading.text.as_bytes();
        self.0[0] = heading.sequence;
        self.0[1] = heading.hash;
        self.0[2] = part.len() as u64;
        self.0[3] = text.len() as u64;
        let bytes = self.bytes_mut();
        bytes[TEXT..TEXT + text.len()].copy_from_slice(text);
        if part.len() > INLINE_BYTES {
            return HEADER;
        }
        bytes[HEADER..HEADER + part.len()].copy_from_slice(part);
        HEADER + part.len()
    }

    pub(crate) fn heading(&self) -> Heading {
        let len = (self.0[3] as usize).min(HEADER - TEXT);
        Heading {
            text: String::from_utf8_lossy(&self.bytes()[TEXT..TEXT + len]).into_owned(),
            hash: self.0[1],
            sequence: self.0[0],
        }
    }

    /// Bytes of the part.
    pub(crate) fn part_bytes(&self) -> u64 {
        self.0[2]
    }

    /// The part, where it is in the frame.
    pub(crate) fn part(&self) -> &[u8] {
        &self.bytes()[HEADER..][..(self.0[2] as usize).min(INLINE_BYTES)]
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        bytemuck::cast_slice(&self.0[..])
    }

    pub(crate) fn bytes_mut(&mut self) -> &mut [u8] {
        bytemuck::cast_slice_mut(&mut self.0[..])
    }
}

#[cfg(test)]
mod tests {
    use drivetrain_core::DType;

    use super::*;

    #[test]
    fn a_frame_holds_what_was_written() {
        let mut frame = Frame::new();
        for (counts, part) in [
            (vec![3], vec![7u8; 12]),
            (vec![1; 400], vec![1; INLINE_BYTES]),
        ] {
            let descriptor = Descriptor::new("all_gather", DType::F32, counts.clone());
            let heading = Heading::of(&descriptor, 9);
            assert_eq!(frame.write(&heading, &part), HEADER + part.len());
            assert_eq!(frame.heading(), heading);
            assert_eq!(frame.part(), part);
            // A text that is cut is still told apart.
            let mut other = counts;
            *other.last_mut().unwrap() += 1;
            let other = Descriptor::new("all_gather", DType::F32, other);
            assert_ne!(Heading::of(&other, 9), heading);
        }
        let heading = Heading::message(&Descriptor::new("send", DType::U8, vec![9000]), 1);
        assert_eq!(frame.write(&heading, &[0; 9000]), HEADER);
        assert_eq!(frame.part_bytes(), 9000);
    }
}
