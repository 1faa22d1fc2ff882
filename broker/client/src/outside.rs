//! The connection of a member outside the virtual machine: a thread that dials the broker's TLS
//! port, carries frames and heartbeats, and connects again after a loss.

use crate::member::MemberState;
use crate::session_file::SessionFile;
use crate::tls::{SERVER_NAME, client_config, make_proof};
use crate::wire::{
    FRAME_BYTES_MAX, append_frame, decode_to_member, encode, read_frame, write_frame,
};
use nix::sys::signal::{SigSet, Signal};
use ring::rand::{SecureRandom, SystemRandom};
use rustls::pki_types::ServerName;
use sempa_broker_session::{Backoff, Closing, GoneReason, Millis, Phase};
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use tokio::io::AsyncWriteExt;
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

/// Time limit for one attempt to connect, with the TLS handshake.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// Time without a connection after which a member counts itself as gone. Above every grace time
/// that makes sense for a broker.
const UNREACHABLE_MAX: Duration = Duration::from_secs(600);

/// State that the program's threads share with the connection's thread.
#[derive(Debug)]
pub(crate) struct OutsideLink {
    pub(crate) state: Mutex<MemberState>,
    pub(crate) changed: Condvar,
    wake: tokio::sync::Notify,
    is_stopping: AtomicBool,
    started_at: Instant,
}

impl OutsideLink {
    pub(crate) fn start(state: MemberState, file: SessionFile) -> io::Result<Arc<Self>> {
        let link = Arc::new(Self {
            state: Mutex::new(state),
            changed: Condvar::new(),
            wake: tokio::sync::Notify::new(),
            is_stopping: AtomicBool::new(false),
            started_at: Instant::now(),
        });
        let config = client_config(&file.fingerprint).map_err(io::Error::other)?;
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()?;
        let thread_link = link.clone();
        std::thread::Builder::new()
            .name("broker-link".into())
            .spawn(move || {
                // A write to a connection that the broker has closed must be an error, and must not
                // end a C program. The signal goes to the thread that writes.
                let mut broken_pipe = SigSet::empty();
                broken_pipe.add(Signal::SIGPIPE);
                if broken_pipe.thread_block().is_err() {
                    return;
                }
                let dialer = Dialer {
                    link: thread_link,
                    file,
                    connector: TlsConnector::from(config),
                };
                runtime.block_on(dialer.run());
            })?;
        Ok(link)
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, MemberState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until the broker has answered the hello; returns false if the deadline passes first.
    pub(crate) fn is_welcomed_before(&self, deadline: Instant) -> bool {
        let mut state = self.lock();
        loop {
            if matches!(state.endpoint.phase(), Phase::Present | Phase::Closed(_)) {
                return true;
            }
            let time = deadline.saturating_duration_since(Instant::now());
            if time.is_zero() {
                return false;
            }
            let waited = self.changed.wait_timeout(state, time);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Makes the connection's thread send what is queued.
    pub(crate) fn flush(&self) {
        self.wake.notify_one();
    }

    /// Ends the connection's thread.
    pub(crate) fn stop(&self) {
        self.is_stopping.store(true, Ordering::Release);
        self.wake.notify_one();
    }

    fn now(&self) -> Millis {
        Millis(u64::try_from(self.started_at.elapsed().as_millis()).unwrap_or(u64::MAX))
    }

    fn is_finished(&self) -> bool {
        self.is_stopping.load(Ordering::Acquire)
            || matches!(self.lock().endpoint.phase(), Phase::Closed(_))
    }
}

struct Dialer {
    link: Arc<OutsideLink>,
    file: SessionFile,
    connector: TlsConnector,
}

fn random_number() -> u32 {
    let mut bytes = [0; 4];
    // Without random bytes the delays of all members are equal, which is harmless.
    let _ = SystemRandom::new().fill(&mut bytes);
    u32::from_ne_bytes(bytes)
}

impl Dialer {
    async fn run(self) {
        let mut backoff = Backoff::default();
        let mut connected_at = Instant::now();
        while !self.link.is_finished() {
            match tokio::time::timeout(CONNECT_TIMEOUT, self.connect()).await {
                Ok(Ok(stream)) => {
                    if self.serve(stream).await {
                        backoff.reset();
                        connected_at = Instant::now();
                    }
                }
                Ok(Err(error)) => self.note_failure(error.to_string()),
                Err(_) => self.note_failure("no answer in time".into()),
            }
            if self.link.is_finished() {
                break;
            }
            if connected_at.elapsed() >= UNREACHABLE_MAX {
                let closing = Closing::Gone(GoneReason::Lost);
                self.link.lock().endpoint.close(closing);
                self.link.changed.notify_all();
                break;
            }
            let delay = backoff.next_delay(random_number());
            self.sleep_unless_stopped(Duration::from_millis(delay.0))
                .await;
        }
        self.link.changed.notify_all();
    }

    async fn sleep_unless_stopped(&self, time: Duration) {
        let end = tokio::time::Instant::now() + time;
        while !self.link.is_stopping.load(Ordering::Acquire) {
            tokio::select! {
                () = tokio::time::sleep_until(end) => return,
                () = self.link.wake.notified() => {}
            }
        }
    }

    fn note_failure(&self, reason: String) {
        self.link.lock().failure = Some(reason);
        self.link.changed.notify_all();
    }

    async fn connect(&self) -> io::Result<TlsStream<TcpStream>> {
        let mut last_error = io::Error::other("the session file names no address");
        for address in &self.file.addresses {
            match self.connect_to(address).await {
                Ok(stream) => return Ok(stream),
                Err(error) => last_error = io::Error::other(format!("{address}: {error}")),
            }
        }
        Err(last_error)
    }

    async fn connect_to(&self, address: &str) -> io::Result<TlsStream<TcpStream>> {
        let tcp = TcpStream::connect(address).await?;
        tcp.set_nodelay(true)?;
        let name = ServerName::try_from(SERVER_NAME).map_err(io::Error::other)?;
        let mut stream = self.connector.connect(name, tcp).await?;
        let proof =
            make_proof(stream.get_ref().1, &self.file.secret.0).map_err(io::Error::other)?;
        write_frame(&mut stream, &proof).await?;
        Ok(stream)
    }

    /// Carries frames until the connection ends. Returns true if the broker has welcomed the
    /// member.
    async fn serve(&self, stream: TlsStream<TcpStream>) -> bool {
        let link = &self.link;
        link.lock().endpoint.connected(link.now());
        let (mut reader, mut writer) = tokio::io::split(stream);
        let reading_link = link.clone();
        let mut reading = tokio::spawn(async move {
            let mut was_welcomed = false;
            while let Ok(bytes) = read_frame(&mut reader, FRAME_BYTES_MAX).await {
                let Some(frame) = decode_to_member(&bytes) else {
                    break;
                };
                let mut state = reading_link.lock();
                state.endpoint.handle(reading_link.now(), frame);
                was_welcomed |= state.endpoint.phase() == Phase::Present;
                drop(state);
                reading_link.changed.notify_all();
                // The frame may have made others, such as a confirmation.
                reading_link.wake.notify_one();
            }
            was_welcomed
        });
        let was_welcomed = loop {
            let (frames, wakeup) = self.take_frames();
            let Some(frames) = frames else {
                reading.abort();
                break true;
            };
            if !frames.is_empty() {
                if writer.write_all(&frames).await.is_err() || writer.flush().await.is_err() {
                    reading.abort();
                    break reading.await.unwrap_or(true);
                }
                continue;
            }
            if link.is_finished() {
                reading.abort();
                break true;
            }
            tokio::select! {
                was_welcomed = &mut reading => break was_welcomed.unwrap_or(false),
                () = link.wake.notified() => {}
                () = tokio::time::sleep(wakeup) => {}
            }
        };
        // The broker learns of the end at once, not from silence.
        let _ = tokio::time::timeout(Duration::from_secs(1), writer.shutdown()).await;
        let mut state = link.lock();
        state.endpoint.disconnected();
        if state.endpoint.phase() == Phase::Disconnected {
            state.failure = Some("the connection has ended".into());
        }
        drop(state);
        link.changed.notify_all();
        was_welcomed
    }

    /// Returns the encoded frames that are queued and the time until the next heartbeat is due.
    /// Returns no frames at all, `None`, if the broker was silent for too long.
    fn take_frames(&self) -> (Option<Vec<u8>>, Duration) {
        let now = self.link.now();
        let mut state = self.link.lock();
        let is_alive = state.endpoint.keep_alive(now);
        let mut buffer = Vec::new();
        while let Some(frame) = state.endpoint.poll(now) {
            append_frame(&mut buffer, &encode(&frame));
        }
        let wakeup = state.endpoint.next_keep_alive().since(now).0.max(1);
        (is_alive.then_some(buffer), Duration::from_millis(wakeup))
    }
}
