//! TLS between the broker and members outside: the member trusts exactly the certificate whose
//! fingerprint is in its session file, and proves the session's secret without sending it.

use ring::{digest, hmac};
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::{CryptoProvider, verify_tls13_signature};
use rustls::pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer, ServerName, UnixTime};
use rustls::{
    ClientConfig, ClientConnection, DigitallySignedStruct, ServerConfig, ServerConnection,
    SignatureScheme,
};
use sempa_broker_session::Role;
use std::sync::Arc;

/// Label of the keying material to which a proof is bound.
const EXPORTER_LABEL: &[u8] = b"EXPORTER-sempa-broker";
/// Length of the keying material in bytes.
const EXPORTED_BYTES: usize = 32;
/// Name in the broker's certificate. The fingerprint, not the name, identifies the broker.
pub const SERVER_NAME: &str = "broker.sempa";

/// Returns the fingerprint of a certificate: SHA-256 in hexadecimal digits.
pub fn fingerprint(certificate: &[u8]) -> String {
    to_hex(digest::digest(&digest::SHA256, certificate).as_ref())
}

fn to_hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Returns the secret of a role, which is derived from the session's key.
pub fn role_secret(session_key: &[u8], role: Role) -> String {
    let key = hmac::Key::new(hmac::HMAC_SHA256, session_key);
    to_hex(hmac::sign(&key, role.to_string().as_bytes()).as_ref())
}

fn proof(secret: &str, keying_material: &[u8]) -> Vec<u8> {
    let key = hmac::Key::new(hmac::HMAC_SHA256, secret.as_bytes());
    hmac::sign(&key, keying_material).as_ref().to_vec()
}

/// Returns the first frame of a member: the proof, bound to this connection, that the member knows
/// the secret.
///
/// # Errors
/// The handshake is not complete.
pub fn make_proof(connection: &ClientConnection, secret: &str) -> Result<Vec<u8>, rustls::Error> {
    let material =
        connection.export_keying_material([0; EXPORTED_BYTES], EXPORTER_LABEL, Some(&[]))?;
    Ok(proof(secret, &material))
}

/// Returns the role whose secret the member has proved; `None` for a wrong proof.
pub fn check_proof(
    connection: &ServerConnection,
    session_key: &[u8],
    received: &[u8],
) -> Option<Role> {
    let material = connection
        .export_keying_material([0; EXPORTED_BYTES], EXPORTER_LABEL, Some(&[]))
        .ok()?;
    [Role::Foreman, Role::Worker].into_iter().find(|role| {
        let key = hmac::Key::new(
            hmac::HMAC_SHA256,
            role_secret(session_key, *role).as_bytes(),
        );
        hmac::verify(&key, &material, received).is_ok()
    })
}

fn provider() -> Arc<CryptoProvider> {
    Arc::new(rustls::crypto::ring::default_provider())
}

/// Returns the settings of a member that trusts one certificate.
///
/// # Errors
/// The cryptography library refuses its own defaults.
pub fn client_config(fingerprint: &str) -> Result<Arc<ClientConfig>, rustls::Error> {
    let provider = provider();
    let verifier = PinnedCertificate {
        fingerprint: fingerprint.to_string(),
        provider: provider.clone(),
    };
    let config = ClientConfig::builder_with_provider(provider)
        .with_protocol_versions(&[&rustls::version::TLS13])?
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(verifier))
        .with_no_client_auth();
    Ok(Arc::new(config))
}

/// Returns the settings of a broker with this certificate and key (DER, PKCS #8).
///
/// # Errors
/// Key and certificate do not fit.
pub fn server_config(certificate: &[u8], key: &[u8]) -> Result<Arc<ServerConfig>, rustls::Error> {
    let key = PrivateKeyDer::Pkcs8(PrivatePkcs8KeyDer::from(key.to_vec()));
    let certificates = vec![CertificateDer::from(certificate.to_vec())];
    let config = ServerConfig::builder_with_provider(provider())
        .with_protocol_versions(&[&rustls::version::TLS13])?
        .with_no_client_auth()
        .with_single_cert(certificates, key)?;
    Ok(Arc::new(config))
}

/// Accepts exactly the certificate with this fingerprint.
#[derive(Debug)]
struct PinnedCertificate {
    fingerprint: String,
    provider: Arc<CryptoProvider>,
}

impl ServerCertVerifier for PinnedCertificate {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        _intermediates: &[CertificateDer<'_>],
        _server_name: &ServerName<'_>,
        _ocsp_response: &[u8],
        _now: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        if fingerprint(end_entity) == self.fingerprint {
            Ok(ServerCertVerified::assertion())
        } else {
            Err(rustls::Error::General(
                "the certificate is not the one of the session file".into(),
            ))
        }
    }

    fn verify_tls12_signature(
        &self,
        _message: &[u8],
        _cert: &CertificateDer<'_>,
        _dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        Err(rustls::Error::General("TLS 1.2 is not offered".into()))
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        let algorithms = &self.provider.signature_verification_algorithms;
        verify_tls13_signature(message, cert, dss, algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.provider
            .signature_verification_algorithms
            .supported_schemes()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::{PROOF_BYTES_MAX, read_frame, write_frame};
    use tokio_rustls::{TlsAcceptor, TlsConnector};

    /// Makes a connection whose member trusts `pinned`, or the broker's certificate, and proves
    /// `secret`. Returns the role that the broker accepts; an error if the member refuses the
    /// broker.
    async fn connect(pinned: Option<&str>, secret: &str) -> std::io::Result<Option<Role>> {
        let made = rcgen::generate_simple_self_signed(vec![SERVER_NAME.to_string()]).expect("made");
        let (certificate, key) = (made.cert.der().to_vec(), made.signing_key.serialize_der());
        let pinned = pinned.map_or_else(|| fingerprint(&certificate), str::to_string);
        let (client_end, server_end) = tokio::io::duplex(1 << 16);
        let acceptor = TlsAcceptor::from(server_config(&certificate, &key).expect("settings"));
        let server = tokio::spawn(async move {
            let mut stream = acceptor.accept(server_end).await?;
            let received = read_frame(&mut stream, PROOF_BYTES_MAX).await?;
            std::io::Result::Ok(check_proof(stream.get_ref().1, b"key", &received))
        });
        let connector = TlsConnector::from(client_config(&pinned).expect("settings"));
        let name = ServerName::try_from(SERVER_NAME).expect("a name");
        let mut stream = connector.connect(name, client_end).await?;
        let proof = make_proof(stream.get_ref().1, secret).expect("the handshake is complete");
        write_frame(&mut stream, &proof).await?;
        server.await.expect("no panic")
    }

    /// The secret decides the role. A member trusts no certificate but the pinned one.
    #[test]
    fn secrets_and_certificates_are_checked() {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .build()
            .expect("a runtime");
        let role_of = |pinned, secret: &str| runtime.block_on(connect(pinned, secret));
        for role in [Role::Worker, Role::Foreman] {
            let secret = role_secret(b"key", role);
            assert_eq!(role_of(None, &secret).expect("connects"), Some(role));
        }
        let foreign = role_secret(b"another key", Role::Worker);
        assert_eq!(role_of(None, &foreign).expect("connects"), None);
        let secret = role_secret(b"key", Role::Worker);
        let other = fingerprint(b"another certificate");
        assert!(role_of(Some(&other), &secret).is_err());
    }
}
