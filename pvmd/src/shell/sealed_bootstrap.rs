//! Delivers the certificate to a daemon that a hoster starts.
//!
//! 1. The master gives the hoster a short secret and a command. The hoster passes the secret on as
//!    `PVM_VMID=…` on standard input, where PVM's hosters put it. The command contains addresses of
//!    the master.
//! 2. The new daemon connects to one of these addresses and fetches its bootstrap line, encrypted
//!    with the secret. (A daemon that is started without a hoster reads its bootstrap line from its
//!    standard input.)
//! 3. The master sends the encrypted line to every peer that connects, and reads nothing. A peer
//!    without the secret receives meaningless bytes.
//!
//! Each secret encrypts one line and is never used again.

use super::bootstrap::{BOOTSTRAP_BYTES_MAX, Refusal, to_hex};
use ring::aead::{Aad, CHACHA20_POLY1305, LessSafeKey, Nonce, UnboundKey};
use ring::rand::{SecureRandom, SystemRandom};
use sempa_proto::PvmError;
use std::io::Read;
use std::net::{Ipv6Addr, SocketAddr, TcpStream};
use std::time::Duration;
use tokio::io::AsyncWriteExt;
use tokio::net::TcpListener;

/// Time limit for a new daemon's attempt at each address of the master.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// Maximum number of addresses of the master in a command; hosters written for PVM have room for
/// 511 characters of the command.
const ADDRESSES_MAX: usize = 4;
const SECRET_BYTES: usize = 32;

/// The secret of one host start.
pub(crate) struct BootstrapSecret([u8; SECRET_BYTES]);

impl BootstrapSecret {
    pub(crate) fn new() -> BootstrapSecret {
        let mut bytes = [0; SECRET_BYTES];
        SystemRandom::new()
            .fill(&mut bytes)
            .expect("the kernel gives random numbers");
        BootstrapSecret(bytes)
    }

    /// Returns the secret in hexadecimal, as it is written to standard input.
    pub(crate) fn to_hex_text(&self) -> String {
        to_hex(&self.0)
    }

    /// Parses the format of [`BootstrapSecret::to_hex_text`].
    pub(crate) fn parse(text: &str) -> Option<BootstrapSecret> {
        let mut bytes = [0; SECRET_BYTES];
        if text.len() != 2 * SECRET_BYTES || !text.is_ascii() {
            return None;
        }
        for (i, byte) in bytes.iter_mut().enumerate() {
            *byte = u8::from_str_radix(&text[2 * i..2 * i + 2], 16).ok()?;
        }
        Some(BootstrapSecret(bytes))
    }

    fn key(&self) -> LessSafeKey {
        LessSafeKey::new(
            UnboundKey::new(&CHACHA20_POLY1305, &self.0).expect("the key has its length"),
        )
    }

    /// A key encrypts only one line, so a constant nonce is safe.
    fn nonce() -> Nonce {
        Nonce::assume_unique_for_key([0; 12])
    }

    /// Encrypts and authenticates the line.
    pub(crate) fn seal(&self, line: &str) -> Vec<u8> {
        let mut bytes = line.as_bytes().to_vec();
        self.key()
            .seal_in_place_append_tag(Self::nonce(), Aad::empty(), &mut bytes)
            .expect("it is short");
        bytes
    }

    /// Decrypts a line that [`BootstrapSecret::seal`] encrypted; `None` for other bytes.
    pub(crate) fn open(&self, mut bytes: Vec<u8>) -> Option<String> {
        let line = self
            .key()
            .open_in_place(Self::nonce(), Aad::empty(), &mut bytes)
            .ok()?;
        String::from_utf8(line.to_vec()).ok()
    }
}

/// Returns the master's addresses with this port, separated by commas, for the command.
pub(crate) fn address_list(own: &[SocketAddr], port: u16) -> String {
    let list: Vec<String> = own
        .iter()
        .take(ADDRESSES_MAX)
        .map(|a| SocketAddr::new(a.ip(), port).to_string())
        .collect();
    list.join(",")
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

/// Sends the encrypted line to every peer that connects, until this future is dropped.
pub(crate) async fn serve_sealed(listener: TcpListener, sealed: Vec<u8>) {
    while let Ok((mut stream, _)) = listener.accept().await {
        // A peer that closes the connection early does not get the line.
        let _ = tokio::time::timeout(CONNECT_TIMEOUT, stream.write_all(&sealed)).await;
    }
}

/// Fetches the line from the master; called by the new daemon.
///
/// # Errors
/// The refusal to send as the reply, if no address delivers the line.
pub(crate) fn fetch_line(list: &str, secret: &BootstrapSecret) -> Result<String, Refusal> {
    let mut last = format!("{list:?} names no address");
    for address in list
        .split(',')
        .filter_map(|word| word.parse::<SocketAddr>().ok())
    {
        let mut sealed = Vec::new();
        let read = TcpStream::connect_timeout(&address, CONNECT_TIMEOUT).and_then(|stream| {
            stream.set_read_timeout(Some(CONNECT_TIMEOUT))?;
            stream
                .take(BOOTSTRAP_BYTES_MAX as u64)
                .read_to_end(&mut sealed)
        });
        match read.map(|_| secret.open(sealed)) {
            Ok(Some(line)) => return Ok(line),
            Ok(None) => {
                last = format!("the data from {address} cannot be decrypted with this secret")
            }
            Err(e) => last = format!("{address}: {e}"),
        }
    }
    let text = format!(
        "cannot fetch the master's instructions ({last}); check that its TCP port is reachable and that the hoster \
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

    /// A secret decrypts the line that it encrypted; it decrypts neither altered bytes nor lines of
    /// other secrets.
    #[test]
    fn secret_opens_only_what_it_sealed() {
        let (secret, other) = (BootstrapSecret::new(), BootstrapSecret::new());
        let again = BootstrapSecret::parse(&secret.to_hex_text()).expect("hexadecimal");
        let sealed = secret.seal("the line\n");
        assert_eq!(again.open(sealed.clone()).as_deref(), Some("the line\n"));
        assert_eq!(other.open(sealed.clone()), None);
        let mut broken = sealed;
        broken[3] ^= 1;
        assert_eq!(secret.open(broken), None);
        assert_eq!(secret.open(Vec::new()), None);
        assert!(
            BootstrapSecret::parse("ab").is_none()
                && BootstrapSecret::parse(&"g".repeat(64)).is_none()
        );
    }

    /// A new daemon with the secret reads its line; with another secret the fetch fails.
    #[tokio::test]
    async fn only_the_secret_reads_the_fetched_line() {
        let listener = listen_any().await.expect("a port");
        let port = listener.local_addr().expect("bound").port();
        let secret = BootstrapSecret::new();
        let giver = tokio::spawn(serve_sealed(listener, secret.seal("hello\n")));
        let list = address_list(&["127.0.0.1:9".parse().expect("an address")], port);
        let text = secret.to_hex_text();
        let (good, bad) = tokio::task::spawn_blocking(move || {
            let good = fetch_line(&list, &BootstrapSecret::parse(&text).expect("hexadecimal"));
            (good, fetch_line(&list, &BootstrapSecret::new()))
        })
        .await
        .expect("no panic");
        assert_eq!(good.ok().as_deref(), Some("hello\n"));
        assert_eq!(bad.err().map(|r| r.error), Some(PvmError::CantStart));
        giver.abort();
    }
}
