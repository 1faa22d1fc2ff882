//! Delivers the bootstrap line with the certificate to a daemon that a hoster or a person starts.
//!
//! 1. The master sends the hoster a short secret and a command. The hoster writes the secret as
//!    `PVM_VMID=…` to the command's standard input, as PVM's hosters do. The command contains
//!    addresses of the master.
//! 2. The new daemon connects to one of these addresses and reads its bootstrap line, which is
//!    encrypted with the secret. (A daemon that is started through a remote shell reads its
//!    bootstrap line from its standard input.)
//! 3. The master sends the encrypted line to every peer that connects, and reads nothing. A peer
//!    without the secret cannot decrypt the line.
//!
//! Each secret encrypts one line and is never used again.

use super::bootstrap::{BOOTSTRAP_BYTES_MAX, Refusal, encode_hex};
use ring::aead::{Aad, CHACHA20_POLY1305, LessSafeKey, Nonce, UnboundKey};
use ring::rand::{SecureRandom, SystemRandom};
use sempa_proto::PvmError;
use std::io::Read;
use std::net::{Ipv6Addr, SocketAddr, TcpStream};
use std::time::Duration;
use tokio::io::AsyncWriteExt;
use tokio::net::TcpListener;

/// Time limit for each attempt to connect to an address of the master, and for each read or write.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// Maximum number of addresses of the master in a command. Hosters written for PVM accept commands
/// of at most 511 characters.
const ADDRESSES_MAX: usize = 4;
const SECRET_BYTES: usize = 32;

/// The secret of one host start.
pub(crate) struct BootstrapSecret([u8; SECRET_BYTES]);

impl BootstrapSecret {
    pub(crate) fn new() -> Self {
        let mut bytes = [0; SECRET_BYTES];
        SystemRandom::new()
            .fill(&mut bytes)
            .expect("the kernel gives random numbers");
        Self(bytes)
    }

    /// Returns the secret in hexadecimal, as the hoster writes it to standard input.
    pub(crate) fn to_hex_text(&self) -> String {
        encode_hex(&self.0)
    }

    /// Parses a secret in the format of [`BootstrapSecret::to_hex_text`]; `None` if the text is
    /// malformed.
    pub(crate) fn parse(text: &str) -> Option<Self> {
        let mut bytes = [0; SECRET_BYTES];
        if text.len() != 2 * SECRET_BYTES || !text.is_ascii() {
            return None;
        }
        for (i, byte) in bytes.iter_mut().enumerate() {
            *byte = u8::from_str_radix(&text[2 * i..2 * i + 2], 16).ok()?;
        }
        Some(Self(bytes))
    }

    fn key(&self) -> LessSafeKey {
        LessSafeKey::new(
            UnboundKey::new(&CHACHA20_POLY1305, &self.0).expect("the key has its length"),
        )
    }

    /// Returns a constant nonce. This is safe, because a key encrypts only one line.
    fn nonce() -> Nonce {
        Nonce::assume_unique_for_key([0; 12])
    }

    /// Returns the line encrypted and authenticated with this secret.
    pub(crate) fn seal(&self, line: &str) -> Vec<u8> {
        let mut bytes = line.as_bytes().to_vec();
        self.key()
            .seal_in_place_append_tag(Self::nonce(), Aad::empty(), &mut bytes)
            .expect("it is short");
        bytes
    }

    /// Returns the line that [`BootstrapSecret::seal`] encrypted with the same secret; `None` for
    /// other bytes.
    pub(crate) fn open(&self, mut bytes: Vec<u8>) -> Option<String> {
        let line = self
            .key()
            .open_in_place(Self::nonce(), Aad::empty(), &mut bytes)
            .ok()?;
        String::from_utf8(line.to_vec()).ok()
    }
}

/// Returns `addresses` with the port `port`, separated by commas, for the command; at most
/// [`ADDRESSES_MAX`] addresses.
pub(crate) fn address_list(addresses: &[SocketAddr], port: u16) -> String {
    let address_texts: Vec<String> = addresses
        .iter()
        .take(ADDRESSES_MAX)
        .map(|a| SocketAddr::new(a.ip(), port).to_string())
        .collect();
    address_texts.join(",")
}

/// Listens on a free port for one host start, on all addresses of this host.
///
/// # Errors
/// The system's error.
pub(crate) async fn listen_any() -> std::io::Result<TcpListener> {
    match TcpListener::bind((Ipv6Addr::UNSPECIFIED, 0)).await {
        Ok(listener) => Ok(listener),
        // Fails on a kernel without IPv6.
        Err(_) => TcpListener::bind(("0.0.0.0", 0)).await,
    }
}

/// Sends the encrypted line to every peer that connects, one after the other, until this future is
/// dropped.
pub(crate) async fn serve_sealed(listener: TcpListener, sealed_line: Vec<u8>) {
    while let Ok((mut stream, _)) = listener.accept().await {
        // Sending fails if the peer closes the connection early. Such a peer gets no complete line.
        let _ = tokio::time::timeout(CONNECT_TIMEOUT, stream.write_all(&sealed_line)).await;
    }
}

/// Reads the encrypted line from the master and returns the decrypted line. Called by the new
/// daemon. Blocks.
///
/// # Errors
/// No address in `address_list` delivers the line. The error is the refusal that the daemon must
/// send as its reply.
pub(crate) fn fetch_line(address_list: &str, secret: &BootstrapSecret) -> Result<String, Refusal> {
    let mut last_error = format!("{address_list:?} names no address");
    for address in address_list
        .split(',')
        .filter_map(|word| word.parse::<SocketAddr>().ok())
    {
        let mut sealed_line = Vec::new();
        let read_result =
            TcpStream::connect_timeout(&address, CONNECT_TIMEOUT).and_then(|stream| {
                stream.set_read_timeout(Some(CONNECT_TIMEOUT))?;
                stream
                    .take(BOOTSTRAP_BYTES_MAX as u64)
                    .read_to_end(&mut sealed_line)
            });
        match read_result.map(|_| secret.open(sealed_line)) {
            Ok(Some(line)) => return Ok(line),
            Ok(None) => {
                last_error = format!("the data from {address} cannot be decrypted with this secret")
            }
            Err(e) => last_error = format!("{address}: {e}"),
        }
    }
    let text = format!(
        "cannot fetch the master's instructions ({last_error}); check that its TCP port is reachable and that the hoster \
         has a current version"
    );
    Err(Refusal {
        error: PvmError::CantStart,
        text,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A secret decrypts the line that it has encrypted. The secret decrypts neither altered bytes
    /// nor lines that another secret has encrypted.
    #[test]
    fn secret_opens_only_what_it_sealed() {
        let (secret, other_secret) = (BootstrapSecret::new(), BootstrapSecret::new());
        let parsed_secret = BootstrapSecret::parse(&secret.to_hex_text()).expect("hexadecimal");
        let sealed_line = secret.seal("the line\n");
        assert_eq!(
            parsed_secret.open(sealed_line.clone()).as_deref(),
            Some("the line\n")
        );
        assert_eq!(other_secret.open(sealed_line.clone()), None);
        let mut altered_line = sealed_line;
        altered_line[3] ^= 1;
        assert_eq!(secret.open(altered_line), None);
        assert_eq!(secret.open(Vec::new()), None);
        assert!(
            BootstrapSecret::parse("ab").is_none()
                && BootstrapSecret::parse(&"g".repeat(64)).is_none()
        );
    }

    /// A new daemon that has the secret gets its line. With another secret, `fetch_line` fails.
    #[tokio::test]
    async fn only_the_secret_reads_the_fetched_line() {
        let listener = listen_any().await.expect("a port");
        let port = listener.local_addr().expect("bound").port();
        let secret = BootstrapSecret::new();
        let server_task = tokio::spawn(serve_sealed(listener, secret.seal("hello\n")));
        let addresses = address_list(&["127.0.0.1:9".parse().expect("an address")], port);
        let secret_text = secret.to_hex_text();
        let (right_result, wrong_result) = tokio::task::spawn_blocking(move || {
            let right_result = fetch_line(
                &addresses,
                &BootstrapSecret::parse(&secret_text).expect("hexadecimal"),
            );
            (
                right_result,
                fetch_line(&addresses, &BootstrapSecret::new()),
            )
        })
        .await
        .expect("no panic");
        assert_eq!(right_result.ok().as_deref(), Some("hello\n"));
        assert_eq!(
            wrong_result.err().map(|r| r.error),
            Some(PvmError::CantStart)
        );
        server_task.abort();
    }
}
