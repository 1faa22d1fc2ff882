//! The target of a pre-copy: receives pages and stores them until the restored task needs them.

use super::super::page_server_wire::{HeaderLayout, PRE_COPY_COUNT, PRE_COPY_PAGES, PageHeader};
use crate::engine::ReceivedPages;
use crate::engine::pages::BLOCK_PAGES;
use sempa_proto::migration::Failure;
use std::io::{self, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;

/// Sends a number of pages to the source ([`PRE_COPY_COUNT`]).
fn send_page_count(stream: &mut UnixStream, pages: u64) -> io::Result<()> {
    stream.write_all(&HeaderLayout::Long.write(&PageHeader {
        command: PRE_COPY_COUNT,
        pages,
        address: 0,
        process: 0,
    }))
}

/// Confirms to the source that all pages that were pre-copied on this stream have arrived.
///
/// # Errors
/// The source does not read from the stream any more.
pub fn acknowledge(received: &ReceivedPages, stream: &OwnedFd) -> io::Result<()> {
    send_page_count(
        &mut UnixStream::from(stream.try_clone()?),
        received.page_count(),
    )
}

/// Sends the source the limit `bytes_max`, converted to pages. Then receives pre-copied pages on
/// this stream until the source reports the end.
///
/// # Errors
/// The stream ended early, the source violated the protocol or the limit, or memory is exhausted.
pub(in super::super) fn receive(
    stream: &OwnedFd,
    bytes_max: u64,
) -> Result<ReceivedPages, Failure> {
    let failed =
        |what: String| Failure::Images(format!("memory that is to go ahead does not come: {what}"));
    let mut stream = UnixStream::from(stream.try_clone().map_err(|e| failed(e.to_string()))?);
    let mut received = ReceivedPages::empty();
    let mut content = vec![0; (BLOCK_PAGES * received.page_size()) as usize];
    send_page_count(&mut stream, bytes_max / received.page_size())
        .map_err(|e| failed(e.to_string()))?;
    loop {
        let mut head = [0; HeaderLayout::Long.bytes()];
        stream
            .read_exact(&mut head)
            .map_err(|e| failed(e.to_string()))?;
        let PageHeader {
            command,
            pages,
            address,
            process,
        } = HeaderLayout::Long.read(&head);
        match command {
            PRE_COPY_COUNT => return Ok(received),
            PRE_COPY_PAGES => {
                let length = received.bytes_within_block(address, pages);
                let length =
                    length.ok_or_else(|| failed(format!("{pages} pages at {address:#x}")))?;
                stream
                    .read_exact(&mut content[..length])
                    .map_err(|e| failed(e.to_string()))?;
                received
                    .insert(process, address, &content[..length])
                    .map_err(|e| failed(e.to_string()))?;
            }
            other => return Err(failed(format!("the source says {other:#x}"))),
        }
        if received.stored_bytes() > bytes_max {
            return Err(failed(format!(
                "there is more of it than {bytes_max} bytes, which it was told"
            )));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::pages::page_size;

    /// Sources that violate the protocol or exceed the limit are refused.
    #[test]
    fn malformed_pre_copies_are_refused() {
        let page = page_size();
        let send_commands = |words: &[(u32, u64, u64)], bytes_max| {
            let (mut theirs, ours) = UnixStream::pair().expect("descriptors");
            for (command, pages, address) in words {
                let head = PageHeader {
                    command: *command,
                    pages: *pages,
                    address: *address,
                    process: 7,
                };
                theirs
                    .write_all(&HeaderLayout::Long.write(&head))
                    .expect("there is room");
                theirs
                    .write_all(&vec![
                        5;
                        if *command == PRE_COPY_PAGES {
                            (pages.min(&2) * page) as usize
                        } else {
                            0
                        }
                    ])
                    .expect("room");
            }
            theirs
                .shutdown(std::net::Shutdown::Write)
                .expect("it is open");
            receive(&ours.into(), bytes_max).map(|store| store.stored_bytes())
        };
        let good = [
            (PRE_COPY_PAGES, 2, 0),
            (PRE_COPY_PAGES, 1, page),
            (PRE_COPY_COUNT, 0, 0),
        ];
        assert_eq!(send_commands(&good, 2 * page), Ok(2 * page));
        assert!(
            matches!(send_commands(&good, page), Err(Failure::Images(why)) if why.contains("more of it"))
        );
        for bad in [
            &good[..2],
            &[(PRE_COPY_PAGES, 1, 5)],
            &[(PRE_COPY_PAGES, 1 << 60, 0)],
            &[(7, 1, 0)],
            &[],
        ] {
            assert!(
                matches!(send_commands(bad, 9 * page), Err(Failure::Images(_))),
                "{bad:?}"
            );
        }
    }
}
