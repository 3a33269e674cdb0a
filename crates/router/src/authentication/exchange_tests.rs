//! Whole exchanges, our two sides against each other and against the vector of RFC 7677.

use proptest::prelude::*;

use super::*;

const MECHANISM_BYTES: &[u8] = MECHANISM.as_bytes();
const ITERATIONS: u32 = 16;

// The user and the exchange of RFC 7677, section 3.
const PENCIL: &str = "SCRAM-SHA-256$4096:W22ZaJ0SNY7soEsUEjb6gQ==$\
    WG5d8oPm3OtcPnkdi4Uo7BkeZkBFzpcXkuLmtbsT4qY=:wfPLwcE6nTWhTAmQ7tl2KeoiWGPlZqQxSrmfPwDl2dU=";
const CLIENT_NONCE: &str = "rOprNGfwEbeRWgbNEkqO";
const SERVER_NONCE: &str = "%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0";
const CLIENT_FIRST: &str = "n,,n=user,r=rOprNGfwEbeRWgbNEkqO";
const SERVER_FIRST: &str = "r=rOprNGfwEbeRWgbNEkqO%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0,s=W22ZaJ0SNY7soEsUEjb6gQ==,i=4096";
const CLIENT_FINAL: &str = "c=biws,r=rOprNGfwEbeRWgbNEkqO%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0,\
    p=dHzbZapWIk4jUhN+Ute9ytag9zjfMHgsqmmiz7AndVQ=";
const SERVER_FINAL: &str = "v=6rriTRBi23WpRR/wtup+mMhUZUn/dB5nLTJRsjl95G4=";

fn verifier(password: &[u8]) -> ScramVerifier {
    ScramVerifier::parse(&ScramVerifier::encode(password, b"sixteen bytes...", ITERATIONS).unwrap()).unwrap()
}

fn client(password: &[u8]) -> ScramClient {
    ScramClient::new(ScramCredential::Password(password.to_vec()))
}

/// Runs one exchange; gives the keys that either side ends with.
fn exchange(verifier: ScramVerifier, client: ScramClient) -> Result<(ScramKeys, ScramKeys), AuthenticationError> {
    let (server, server_first) = ScramServer::start(verifier, MECHANISM_BYTES, client.client_first().as_bytes())?;
    let (client, client_final) = client.client_final(server_first.as_bytes())?;
    let (server_final, learned) = server.finish(client_final.as_bytes())?;
    Ok((learned, client.verify(server_final.as_bytes())?))
}

#[test]
fn published_vector_on_both_sides() {
    let credential = ScramCredential::Password(b"pencil".to_vec());
    let client = ScramClient::with_nonce(credential, "user", CLIENT_NONCE.to_owned());
    assert_eq!(client.client_first(), CLIENT_FIRST);

    let pencil = ScramVerifier::parse(PENCIL).unwrap();
    let (server, server_first) =
        ScramServer::start_with_nonce(pencil, MECHANISM_BYTES, CLIENT_FIRST.as_bytes(), SERVER_NONCE).unwrap();
    assert_eq!(server_first, SERVER_FIRST);

    let (client, client_final) = client.client_final(SERVER_FIRST.as_bytes()).unwrap();
    assert_eq!(client_final, CLIENT_FINAL);

    let (server_final, learned) = server.finish(CLIENT_FINAL.as_bytes()).unwrap();
    assert_eq!(server_final, SERVER_FINAL);
    assert_eq!(client.verify(SERVER_FINAL.as_bytes()).unwrap(), learned);
}

#[test]
fn learned_keys_log_in_to_servers_with_the_same_verifier_only() {
    let (learned, derived) = exchange(verifier(b"secret"), client(b"secret")).unwrap();
    assert_eq!(learned, derived);

    let with_keys = || ScramClient::new(ScramCredential::Keys(learned.clone()));
    let (again, _) = exchange(verifier(b"secret"), with_keys()).unwrap();
    assert_eq!(again, learned);

    // The same password under another salt, and another password under the same salt.
    let other_salt = ScramVerifier::encode(b"secret", b"another salt", ITERATIONS).unwrap();
    assert_eq!(
        exchange(ScramVerifier::parse(&other_salt).unwrap(), with_keys()),
        Err(AuthenticationError::VerifierDiffers)
    );
    assert_eq!(exchange(verifier(b"changed"), with_keys()), Err(AuthenticationError::WrongPassword));
}

#[test]
fn wrong_password_and_unknown_role_fail_alike_at_the_end() {
    let mock = ScramVerifier::mock(&MockSecret::new([1; 32]), "nobody");
    for verifier in [verifier(b"secret"), mock] {
        let error = exchange(verifier, client(b"guess")).unwrap_err();
        assert_eq!(error, AuthenticationError::WrongPassword);
        assert_eq!(error.sqlstate(), "28P01");
    }
}

#[test]
fn a_mock_refuses_even_the_proof_that_fits_its_keys() {
    let mut doomed = verifier(b"secret");
    doomed.doomed = true;
    assert_eq!(exchange(doomed, client(b"secret")), Err(AuthenticationError::WrongPassword));
}

#[test]
fn a_recorded_exchange_cannot_be_replayed() {
    let pencil = || ScramVerifier::parse(PENCIL).unwrap();
    let (server, _) = ScramServer::start(pencil(), MECHANISM_BYTES, CLIENT_FIRST.as_bytes()).unwrap();
    let error = server.finish(CLIENT_FINAL.as_bytes()).unwrap_err();
    assert_eq!(error, AuthenticationError::NonceMismatch("client-final"));

    let fresh = || client(b"pencil");
    assert_eq!(
        fresh().client_final(SERVER_FIRST.as_bytes()).unwrap_err(),
        AuthenticationError::NonceMismatch("server-first")
    );
    let echoing = fresh();
    let echo = format!("r={},s=c2FsdA==,i=1", echoing.nonce);
    assert_eq!(echoing.client_final(echo.as_bytes()).unwrap_err(), AuthenticationError::NonceMismatch("server-first"));
}

#[test]
fn two_exchanges_never_share_a_nonce() {
    let firsts: std::collections::HashSet<String> = (0..100).map(|_| client(b"x").client_first()).collect();
    assert_eq!(firsts.len(), 100);
    let answers: std::collections::HashSet<String> = (0..100)
        .map(|_| ScramServer::start(verifier(b"x"), MECHANISM_BYTES, CLIENT_FIRST.as_bytes()).unwrap().1)
        .collect();
    assert_eq!(answers.len(), 100);
}

#[test]
fn channel_binding_is_refused_and_its_downgrade_noticed() {
    let start = |mechanism: &[u8], first: &str| {
        ScramServer::start_with_nonce(ScramVerifier::parse(PENCIL).unwrap(), mechanism, first.as_bytes(), SERVER_NONCE)
    };
    assert_eq!(
        start(b"SCRAM-SHA-256-PLUS", CLIENT_FIRST).unwrap_err(),
        AuthenticationError::UnknownMechanism("SCRAM-SHA-256-PLUS".to_owned())
    );
    let bound = CLIENT_FIRST.replacen("n,,", "p=tls-server-end-point,,", 1);
    assert_eq!(start(MECHANISM_BYTES, &bound).unwrap_err(), AuthenticationError::ChannelBindingRequired);

    // A client that could bind says 'y'; somebody on the way who makes it 'n' is caught by client-final.
    let (server, _) = start(MECHANISM_BYTES, &CLIENT_FIRST.replacen("n,,", "y,,", 1)).unwrap();
    assert_eq!(server.finish(CLIENT_FINAL.as_bytes()), Err(AuthenticationError::ChannelBindingMismatch));
}

#[test]
fn a_server_that_does_not_know_the_verifier_is_noticed() {
    let client = client(b"secret");
    let (_, server_first) =
        ScramServer::start(verifier(b"secret"), MECHANISM_BYTES, client.client_first().as_bytes()).unwrap();
    let (client, _) = client.client_final(server_first.as_bytes()).unwrap();
    assert_eq!(client.verify(SERVER_FINAL.as_bytes()), Err(AuthenticationError::WrongServerSignature));
}

#[test]
fn a_server_cannot_make_the_router_derive_for_ever() {
    let client = client(b"secret");
    let hostile = format!("r={}x,s=c2FsdA==,i=2147483647", client.nonce);
    let error = client.client_final(hostile.as_bytes()).unwrap_err();
    assert_eq!(error, AuthenticationError::TooManyIterations(2_147_483_647));
}

#[test]
fn debug_of_every_state_shows_no_secret() {
    let client = client(b"hunter2");
    assert!(format!("{client:?}").contains("Password(..)"));
    let (server, server_first) =
        ScramServer::start(verifier(b"hunter2"), MECHANISM_BYTES, client.client_first().as_bytes()).unwrap();
    let (client, _) = client.client_final(server_first.as_bytes()).unwrap();
    assert_eq!(
        format!("{client:?}"),
        format!("ScramClientFinal {{ keys: ScramKeys {{ iterations: {ITERATIONS}, .. }}, server_signature: Key(..) }}")
    );
    assert!(format!("{server:?}").contains(&format!("ScramVerifier {{ iterations: {ITERATIONS}, .. }}")));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn every_password_logs_in_and_no_other(
        password in proptest::collection::vec(any::<u8>(), 0..100),
        salt in proptest::collection::vec(any::<u8>(), 1..40),
        guess in "[ -~]{1,20}",
    ) {
        let stored = ScramVerifier::encode(&password, &salt, ITERATIONS).unwrap();
        let parsed = ScramVerifier::parse(&stored).unwrap();
        let (learned, derived) = exchange(parsed.clone(), client(&password)).unwrap();
        prop_assert_eq!(learned, derived);
        prop_assume!(guess.as_bytes() != password);
        prop_assert_eq!(exchange(parsed, client(guess.as_bytes())), Err(AuthenticationError::WrongPassword));
    }

    #[test]
    fn a_changed_byte_of_client_final_never_logs_in(position in 0usize..CLIENT_FINAL.len(), change in 1u8..=255) {
        let (server, _) = ScramServer::start_with_nonce(
            ScramVerifier::parse(PENCIL).unwrap(), MECHANISM_BYTES, CLIENT_FIRST.as_bytes(), SERVER_NONCE,
        ).unwrap();
        let mut damaged = CLIENT_FINAL.as_bytes().to_vec();
        damaged[position] ^= change;
        prop_assert!(server.finish(&damaged).is_err());
    }

    #[test]
    fn any_bytes_at_any_step_give_an_error(input in proptest::collection::vec(any::<u8>(), 0..1100)) {
        let _ = ScramServer::start(verifier(b"x"), &input, CLIENT_FIRST.as_bytes());
        let _ = ScramServer::start(verifier(b"x"), MECHANISM_BYTES, &input);
        let (server, server_first) =
            ScramServer::start(verifier(b"x"), MECHANISM_BYTES, CLIENT_FIRST.as_bytes()).unwrap();
        prop_assert!(server.finish(&input).is_err());
        prop_assert!(client(b"x").client_final(&input).is_err());
        let known = ScramClient::with_nonce(
            ScramCredential::Password(b"x".to_vec()), "user", CLIENT_NONCE.to_owned(),
        );
        let (known, _) = known.client_final(server_first.as_bytes()).unwrap();
        prop_assert!(known.verify(&input).is_err());
    }
}
