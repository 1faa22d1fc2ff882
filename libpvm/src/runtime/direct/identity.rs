//! Key and certificate of one side of a route, and TLS configurations that accept exactly one
//! certificate.

use super::SetupError;
use rcgen::{CertificateParams, KeyPair};
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::client::{Resumption, UnbufferedClientConnection};
use rustls::crypto::{CryptoProvider, ring, verify_tls13_signature};
use rustls::pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer, ServerName, UnixTime};
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::server::{NoServerSessionStorage, UnbufferedServerConnection};
use rustls::{
    CertificateError, ClientConfig, DigitallySignedStruct, DistinguishedName, Error, ServerConfig,
    SignatureScheme, version::TLS13,
};
use sempa_proto::route::Fingerprint;
use std::sync::{Arc, OnceLock};

/// Server name in every certificate. The name has no meaning, because the fingerprint identifies
/// the peer.
const SERVER_NAME: &str = "task.sempa";
/// Protocol name that both sides must offer in the handshake.
const ALPN_PROTOCOL: &[u8] = b"sempa-direct/1";

/// Key and certificate of one side of one route.
pub(crate) struct Identity {
    certificate: CertificateDer<'static>,
    key: PrivateKeyDer<'static>,
}

impl std::fmt::Debug for Identity {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Identity").finish_non_exhaustive()
    }
}

fn local_error(e: impl std::fmt::Display) -> SetupError {
    SetupError::LocalFailure(e.to_string())
}

impl Identity {
    /// Creates a new key and certificate.
    ///
    /// # Errors
    /// The system provides no randomness.
    pub(crate) fn new() -> Result<Self, SetupError> {
        let key = KeyPair::generate().map_err(local_error)?;
        let params = CertificateParams::new(vec![SERVER_NAME.to_string()]).map_err(local_error)?;
        let certificate = params.self_signed(&key).map_err(local_error)?.der().clone();
        Ok(Self {
            certificate,
            key: PrivatePkcs8KeyDer::from(key.serialize_der()).into(),
        })
    }

    /// Returns the fingerprint that the peer needs to verify this certificate.
    pub(crate) fn fingerprint(&self) -> Fingerprint {
        fingerprint(&self.certificate)
    }

    /// Creates the client side of a TLS handshake that accepts only the certificate with the
    /// fingerprint `peer_fingerprint`.
    pub(super) fn client_connection(
        &self,
        peer_fingerprint: Fingerprint,
    ) -> Result<UnbufferedClientConnection, SetupError> {
        let mut config = ClientConfig::builder_with_provider(crypto_provider())
            .with_protocol_versions(&[&TLS13])
            .map_err(local_error)?
            .dangerous()
            .with_custom_certificate_verifier(Arc::new(PinnedCertificate(peer_fingerprint)))
            .with_client_auth_cert(vec![self.certificate.clone()], self.key.clone_key())
            .map_err(local_error)?;
        config.alpn_protocols = vec![ALPN_PROTOCOL.to_vec()];
        config.resumption = Resumption::disabled();
        config.enable_secret_extraction = true;
        let name = ServerName::try_from(SERVER_NAME).map_err(local_error)?;
        UnbufferedClientConnection::new(Arc::new(config), name).map_err(local_error)
    }

    /// Creates the server side of a TLS handshake that accepts only the certificate with the
    /// fingerprint `peer_fingerprint`.
    pub(super) fn server_connection(
        &self,
        peer_fingerprint: Fingerprint,
    ) -> Result<UnbufferedServerConnection, SetupError> {
        let mut config = ServerConfig::builder_with_provider(crypto_provider())
            .with_protocol_versions(&[&TLS13])
            .map_err(local_error)?
            .with_client_cert_verifier(Arc::new(PinnedCertificate(peer_fingerprint)))
            .with_single_cert(vec![self.certificate.clone()], self.key.clone_key())
            .map_err(local_error)?;
        config.alpn_protocols = vec![ALPN_PROTOCOL.to_vec()];
        config.session_storage = Arc::new(NoServerSessionStorage {});
        config.send_tls13_tickets = 0;
        config.enable_secret_extraction = true;
        UnbufferedServerConnection::new(Arc::new(config)).map_err(local_error)
    }
}

fn fingerprint(certificate: &[u8]) -> Fingerprint {
    *blake3::hash(certificate).as_bytes()
}

/// Returns the cryptographic algorithms. AES is preferred if the CPU has AES instructions,
/// otherwise ChaCha20.
fn crypto_provider() -> Arc<CryptoProvider> {
    static PROVIDER: OnceLock<Arc<CryptoProvider>> = OnceLock::new();
    let create_provider = || {
        let aes = ring::cipher_suite::TLS13_AES_128_GCM_SHA256;
        let chacha = ring::cipher_suite::TLS13_CHACHA20_POLY1305_SHA256;
        let mut provider = ring::default_provider();
        provider.cipher_suites = if has_aes_instructions() {
            vec![aes, chacha]
        } else {
            vec![chacha, aes]
        };
        provider.kx_groups = vec![ring::kx_group::X25519];
        Arc::new(provider)
    };
    PROVIDER.get_or_init(create_provider).clone()
}

fn has_aes_instructions() -> bool {
    #[cfg(target_arch = "x86_64")]
    return std::arch::is_x86_feature_detected!("aes")
        && std::arch::is_x86_feature_detected!("pclmulqdq");
    #[cfg(target_arch = "aarch64")]
    return std::arch::is_aarch64_feature_detected!("aes")
        && std::arch::is_aarch64_feature_detected!("pmull");
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    false
}

/// Certificate verifier that accepts the certificate with this fingerprint and no other.
#[derive(Debug)]
struct PinnedCertificate(Fingerprint);

impl PinnedCertificate {
    fn verify_certificate(
        &self,
        certificate: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
    ) -> Result<(), Error> {
        if intermediates.is_empty() && fingerprint(certificate) == self.0 {
            Ok(())
        } else {
            Err(Error::InvalidCertificate(
                CertificateError::ApplicationVerificationFailure,
            ))
        }
    }

    /// Verifies that the peer has the private key of the certificate.
    fn verify_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        verify_tls13_signature(
            message,
            certificate,
            signature,
            &crypto_provider().signature_verification_algorithms,
        )
    }
}

/// Rejects signatures of TLS 1.2, which is never negotiated.
fn reject_tls12() -> Result<HandshakeSignatureValid, Error> {
    Err(Error::General("a direct route uses TLS 1.3 only".into()))
}

impl ServerCertVerifier for PinnedCertificate {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        self.verify_certificate(end_entity, intermediates)
            .map(|()| ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        reject_tls12()
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.verify_signature(message, cert, dss)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        crypto_provider()
            .signature_verification_algorithms
            .supported_schemes()
    }
}

impl ClientCertVerifier for PinnedCertificate {
    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        &[]
    }

    fn verify_client_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        _: UnixTime,
    ) -> Result<ClientCertVerified, Error> {
        self.verify_certificate(end_entity, intermediates)
            .map(|()| ClientCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        reject_tls12()
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.verify_signature(message, cert, dss)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        crypto_provider()
            .signature_verification_algorithms
            .supported_schemes()
    }
}
