"""Words to print: a short lexicon of seven languages, and new words made of its trigrams, which can only be read."""

from __future__ import annotations

from functools import cache
from random import Random

from mmqc.samples.docs.alphabet import TOKEN

LEXICON = {
    "en": "the and with from after under between water house garden letter number morning evening winter summer market street "
    "window kitchen paper river mountain island bridge station travel ticket weather silver copper engine handle pocket blanket "
    "candle butter cheese bread apple orange pepper sugar coffee onion potato carrot lemon basket bottle glass table chair report "
    "invoice payment customer delivery discount quantity balance monthly annual service contract quality measure standard account "
    "machine signal network pattern surface volume pressure current magnet crystal planet shadow forest animal feather village",
    "de": "der die und mit nach unter zwischen Wasser Haus Garten Brief Nummer Morgen Abend Winter Sommer Markt Straße Fenster "
    "Küche Papier Fluss Gebirge Insel Brücke Bahnhof Reise Fahrkarte Wetter Silber Kupfer Schlüssel Tasche Decke Kerze Butter Käse "
    "Brot Apfel Pfeffer Zucker Kaffee Zwiebel Möhre Zitrone Flasche Glas Tisch Stuhl Rechnung Zahlung Kunde Lieferung Menge Betrag "
    "Dienst Vertrag Größe Prüfung Maschine Muster Fläche Druck Strom Schatten Wald Feder über für können müssen schön grün",
    "fr": "le la et avec après sous entre eau maison jardin lettre numéro matin soir hiver été marché rue fenêtre cuisine papier "
    "rivière montagne île pont gare voyage billet temps argent cuivre clé poche couverture bougie beurre fromage pain pomme poivre "
    "sucre café oignon carotte citron bouteille verre table chaise facture paiement client livraison quantité solde mensuel année "
    "service contrat qualité mesure compte machine réseau surface pression forêt plume château garçon français où déjà tête hôtel",
    "es": "el la y con después bajo entre agua casa jardín carta número mañana tarde invierno verano mercado calle ventana cocina "
    "papel río isla puente estación viaje billete tiempo plata cobre llave bolsillo manta vela mantequilla queso pan manzana "
    "pimienta azúcar café cebolla zanahoria limón botella vaso mesa silla factura pago cliente entrega cantidad saldo mensual año "
    "servicio contrato calidad medida cuenta máquina señal red presión bosque pluma niño pequeño también corazón",
    "pl": "i z po pod między woda dom ogród list numer rano wieczór zima lato rynek ulica okno kuchnia papier rzeka góra most "
    "dworzec podróż bilet pogoda srebro miedź klucz kieszeń koc świeca masło ser chleb jabłko pieprz cukier kawa cebula marchew "
    "cytryna butelka szklanka stół krzesło rachunek płatność klient dostawa ilość saldo roczny usługa umowa jakość miara maszyna "
    "sygnał sieć ciśnienie prąd cień las pióro źródło łąka ćma żółty święto część dzień być żeby książka",
    "el": "και με μετά κάτω μεταξύ νερό σπίτι κήπος γράμμα αριθμός πρωί βράδυ χειμώνας αγορά δρόμος παράθυρο κουζίνα χαρτί ποτάμι "
    "βουνό νησί γέφυρα σταθμός εισιτήριο καιρός χαλκός κλειδί τσέπη κουβέρτα κερί βούτυρο τυρί ψωμί μήλο πιπέρι ζάχαρη καφές "
    "κρεμμύδι καρότο λεμόνι μπουκάλι ποτήρι τραπέζι καρέκλα τιμή πληρωμή πελάτης παράδοση ποσό ετήσιο συμφωνία μέτρο μηχανή "
    "σήμα δίκτυο πίεση ρεύμα δάσος φτερό θάλασσα ήλιος ψάρι φύλλο ημέρα άνθρωπος",
    "ru": "и с после под между вода дом сад письмо номер утро вечер зима лето рынок улица окно кухня бумага река гора остров мост "
    "вокзал поездка билет погода серебро медь ключ карман одеяло свеча масло сыр хлеб яблоко перец сахар кофе лук морковь лимон "
    "бутылка стакан стол стул счёт оплата клиент доставка скидка количество остаток годовой служба договор качество мера машина "
    "сигнал сеть поверхность давление ток тень лес перо деревня день человек большой объект щука вьюга этаж жёлтый",
}
LANGUAGES = tuple(LEXICON)
MADE_UP = 0.6  # share of words that no lexicon holds


@cache
def _words(language: str) -> tuple[str, ...]:
    return tuple(LEXICON[language].replace("ё", "е").split())


@cache
def _follows(language: str) -> dict[str, str]:
    """Two characters -> the characters that follow them, a space at a word's ends."""
    found: dict[str, str] = {}
    for word in _words(language):
        padded = f"  {word.lower()} "
        for i in range(len(padded) - 2):
            found[padded[i : i + 2]] = found.get(padded[i : i + 2], "") + padded[i + 2]
    return found


def made_up(rnd: Random, language: str) -> str:
    """A word of 3 to 10 letters that follows the language's trigrams."""
    follows = _follows(language)
    while True:
        text = "  "
        while len(text) < 13:
            letter = rnd.choice(follows[text[-2:]])
            if letter == " ":
                break
            text += letter
        if 5 <= len(text) <= 12:
            return text[2:]


def word(rnd: Random, language: str) -> str:
    """A word, in the lexicon or made up; one in five starts with a capital."""
    found = made_up(rnd, language) if rnd.random() < MADE_UP else rnd.choice(_words(language))
    capital = found[0].upper()
    return capital + found[1:] if rnd.random() < 0.2 and capital in TOKEN else found


def number(rnd: Random) -> str:
    """A number as documents hold them: whole, with decimals, a year, a percentage, a code."""
    form = rnd.randrange(5)
    if form == 0:
        return str(rnd.randrange(10 ** rnd.randint(1, 5)))
    if form == 1:
        return f"{rnd.randrange(10 ** rnd.randint(1, 4))}.{rnd.randrange(100):02d}"
    if form == 2:
        return str(rnd.randint(1900, 2040))
    if form == 3:
        return f"{rnd.randrange(101)}%"
    return "".join(rnd.choice("ABCDEFGHJKLMNPRSTUVWXYZ") for _ in range(2)) + f"-{rnd.randrange(10000):04d}"


def token(rnd: Random, language: str) -> str:
    """A word as running text has it: now and then a number, or with a mark behind it."""
    draw = rnd.random()
    if draw < 0.12:
        return number(rnd)
    found = word(rnd, language)
    return found + rnd.choice(",.;:!?") if draw < 0.22 else found
