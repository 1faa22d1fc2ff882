//! The TLS port for members outside the virtual machine.

use crate::serve::Input;
use sempa_broker_client::tls::check_proof;
use sempa_broker_client::wire::{
    FRAME_BYTES_MAX, PROOF_BYTES_MAX, decode_to_broker, encode, read_frame, write_frame,
};
use sempa_broker_session::{LinkId, Role, ToBroker, ToMember};
use std::io;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::SyncSender;
use std::time::Duration;
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::sync::{Semaphore, mpsc};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::ServerConfig;

/// Time limit for the TLS handshake and the proof of the secret.
const ADMISSION_TIMEOUT: Duration = Duration::from_secs(10);
/// Largest number of connections that have not proved the secret yet.
const ADMISSIONS_MAX: usize = 64;
/// Largest number of frames that wait for one connection. A connection that is slower is closed;
/// the member resumes on the next one.
const FRAMES_MAX: usize = 4096;
/// Number of pending connections in the kernel.
const BACKLOG: u32 = 1024;
/// Pause after a failed accept, such as one for lack of descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Sends frames to one connection. Dropping the value closes the connection after the frames.
#[derive(Clone, Debug)]
pub(crate) struct FrameSender(mpsc::Sender<ToMember>);

impl FrameSender {
    /// Queues a frame. Returns false if the connection is closed or too slow.
    pub(crate) fn send(&self, frame: ToMember) -> bool {
        self.0.try_send(frame).is_ok()
    }
}

/// The numbers of connections, of both kinds.
#[derive(Debug, Default)]
pub(crate) struct LinkNumbers(AtomicU64);

impl LinkNumbers {
    pub(crate) fn next(&self) -> LinkId {
        LinkId(self.0.fetch_add(1, Ordering::Relaxed) + 1)
    }
}

/// Listens on a TCP port of all addresses of the host; on port 0 the system chooses.
///
/// # Errors
/// The port is taken.
pub(crate) fn bind(port: u16) -> io::Result<TcpListener> {
    let listen = |address: SocketAddr| {
        let socket = match address {
            SocketAddr::V4(_) => TcpSocket::new_v4()?,
            SocketAddr::V6(_) => TcpSocket::new_v6()?,
        };
        // The port of a killed broker is free at once for the next one.
        socket.set_reuseaddr(true)?;
        socket.bind(address)?;
        socket.listen(BACKLOG)
    };
    listen((Ipv6Addr::UNSPECIFIED, port).into())
        .or_else(|_| listen((Ipv4Addr::UNSPECIFIED, port).into()))
}

#[derive(Clone)]
pub(crate) struct Listener {
    pub(crate) config: Arc<ServerConfig>,
    pub(crate) session_key: Arc<Vec<u8>>,
    pub(crate) inputs: SyncSender<Input>,
    pub(crate) numbers: Arc<LinkNumbers>,
}

impl Listener {
    /// Accepts connections until the runtime ends.
    pub(crate) async fn run(self, listener: TcpListener) {
        let admissions = Arc::new(Semaphore::new(ADMISSIONS_MAX));
        loop {
            let Ok(permit) = admissions.clone().acquire_owned().await else {
                return;
            };
            match listener.accept().await {
                Ok((tcp, _)) => {
                    let connection = self.clone();
                    tokio::spawn(async move {
                        let admission = connection.admit(tcp);
                        let admitted = tokio::time::timeout(ADMISSION_TIMEOUT, admission).await;
                        drop(permit);
                        if let Ok(Ok((stream, role))) = admitted {
                            connection.serve(stream, role).await;
                        }
                    });
                }
                Err(_) => tokio::time::sleep(ACCEPT_PAUSE).await,
            }
        }
    }

    /// Makes the handshake and checks the proof of the secret.
    async fn admit(
        &self,
        tcp: TcpStream,
    ) -> io::Result<(tokio_rustls::server::TlsStream<TcpStream>, Role)> {
        tcp.set_nodelay(true)?;
        let acceptor = TlsAcceptor::from(self.config.clone());
        let mut stream = acceptor.accept(tcp).await?;
        let proof = read_frame(&mut stream, PROOF_BYTES_MAX).await?;
        let role = check_proof(stream.get_ref().1, &self.session_key, &proof);
        let role = role.ok_or(io::ErrorKind::PermissionDenied)?;
        Ok((stream, role))
    }

    /// Carries frames between the connection and the broker.
    async fn serve(self, stream: tokio_rustls::server::TlsStream<TcpStream>, role: Role) {
        let link = self.numbers.next();
        let (sender, mut frames) = mpsc::channel(FRAMES_MAX);
        let opened = Input::Opened {
            link,
            role,
            sender: FrameSender(sender),
        };
        if self.pass_on(opened).await.is_err() {
            return;
        }
        let (mut reader, mut writer) = tokio::io::split(stream);
        let reading = self.clone();
        let mut reading = tokio::spawn(async move {
            while let Ok(frame) = read_frame_of_member(&mut reader).await {
                if reading.pass_on(Input::Frame { link, frame }).await.is_err() {
                    break;
                }
            }
        });
        loop {
            tokio::select! {
                _ = &mut reading => break,
                frame = frames.recv() => {
                    let Some(frame) = frame else {
                        break;
                    };
                    if write_frame(&mut writer, &encode(&frame)).await.is_err() {
                        break;
                    }
                }
            }
        }
        reading.abort();
        // The peer may be gone; then nobody misses an orderly end.
        let _ = tokio::time::timeout(
            ADMISSION_TIMEOUT,
            tokio::io::AsyncWriteExt::shutdown(&mut writer),
        )
        .await;
        // The broker ends when its channel is closed.
        let _ = self.pass_on(Input::Closed { link }).await;
    }

    /// Passes an input on to the broker's thread; waits while that thread is behind.
    async fn pass_on(&self, input: Input) -> Result<(), ()> {
        let inputs = self.inputs.clone();
        match inputs.try_send(input) {
            Ok(()) => Ok(()),
            Err(std::sync::mpsc::TrySendError::Disconnected(_)) => Err(()),
            Err(std::sync::mpsc::TrySendError::Full(input)) => {
                let sending = tokio::task::spawn_blocking(move || inputs.send(input));
                sending.await.map_err(drop)?.map_err(drop)
            }
        }
    }
}

async fn read_frame_of_member(
    reader: &mut (impl tokio::io::AsyncRead + Unpin),
) -> io::Result<ToBroker> {
    let bytes = read_frame(reader, FRAME_BYTES_MAX).await?;
    decode_to_broker(&bytes).ok_or_else(|| io::ErrorKind::InvalidData.into())
}
